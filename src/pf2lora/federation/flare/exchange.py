"""Messages between the server and its sites over FLARE, a task for each; and which sites it has heard of."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from pf2lora.federation.flare.executor import BODY
from pf2lora.federation.protocol.masked import Take
from pf2lora.federation.protocol.messages import encode
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.run_status import ALIVE, ENDED, SITES, Status

PERIOD = 0.05  # seconds between looks at the tasks
FRESH = 30.0  # seconds within which a connected site was heard of
LOST = 90.0  # seconds after which one is not waited for: FLARE takes it for dead after 60


def as_it_is(site: str, data: object) -> object:
    """What is kept of an answer, where nobody says otherwise: all of it."""
    return data


class SiteMessages(Controller):
    """What a controller says to sites and hears from them. `root` is the server's kit."""

    root: Path
    abort: Signal
    status: Status
    fl_ctx: FLContext

    def __init__(self) -> None:
        super().__init__(task_check_period=PERIOD)
        self.changed = threading.Condition()
        self.started = time.time()
        self.bytes_received = self.bytes_sent = 0

    @abstractmethod
    def current_round(self) -> int:
        """The round that is asked about."""

    def exchange(
        self, name: str, requests: Mapping[str, bytes], /, timeout: float, take: Take = as_it_is
    ) -> dict[str, object]:
        """Send every site its request; what `take` makes of what came back within `timeout` seconds, one by one as it
        arrives. Nobody waits for a site that was started again meanwhile, whose request went with the process that it
        was, or is gone."""
        answers, waiting, failed = dict[str, object](), set(requests), list[Exception]()

        def deliver(site: str, data: object) -> None:
            if site not in waiting:  # after the end
                return
            waiting.discard(site)
            try:
                answers[site] = take(site, data)
            except (
                Exception
            ) as error:  # the server's own, a full disk: this is FLARE's thread, the run's must know
                failed.append(error)

        tasks = [
            self.post(name, site, data, math.ceil(timeout), partial(deliver, site))
            for site, data in requests.items()
        ]
        until = time.monotonic() + timeout
        with self.changed:
            while time.monotonic() < until and not self.abort.triggered:
                if failed or all(self.lost(s) for s in waiting):
                    break
                self.changed.wait(timeout=min(0.5, max(0.01, until - time.monotonic())))
            waiting.clear()
        for task in tasks:
            if task.completion_status is None and len(answers) < len(requests):
                self.cancel_task(task, fl_ctx=self.fl_ctx)
        if failed:
            raise failed[0]
        return answers

    def post(
        self, name: str, site: str, data: bytes, seconds: int, deliver: Callable[[object], None]
    ) -> Task:
        """One FLARE task for one site, whose answer goes to `deliver`; `seconds` 0 waits for ever."""
        number = self.current_round()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            answer, client_task.result = (
                body(client_task.result, number),
                None,
            )  # FLARE would keep it to the end
            with self.changed:
                self.bytes_received += len(answer) if isinstance(answer, bytes) else 0
                deliver(answer)
                self.changed.notify_all()

        task = Task(name=name, data=Shareable({BODY: data}), timeout=seconds, result_received_cb=received)
        self.bytes_sent += len(data)
        self.send(task, self.fl_ctx, targets=[site])
        return task

    # --- who was heard of -----------------------------------------------------------------------------------

    def lost(self, site: str) -> bool:
        """Whether nothing comes from a site any more: it was started again, is silent, its part of this job is over, or
        it was removed."""
        if self.started_again(site) or self.silent(site) or self.over_at(site):
            return True
        return site in removed(self.root)

    def started_again(self, site: str) -> bool:
        """Whether a site found the server after this job began."""
        return age(self.root / SITES / site) < time.time() - self.started

    def silent(self, site: str) -> bool:
        """Whether a site's heartbeat has stopped."""
        return LOST < age(self.root / ALIVE / site) < math.inf

    def over_at(self, site: str) -> bool:
        """Whether a site said that its part of this job is over."""
        try:
            return (self.root / ENDED / site).read_text() == self.status.job
        except OSError:
            return False

    def until(self, site: str, seconds: float) -> str:
        """How long a site was waited for."""
        if self.started_again(site):
            return "before it was started again"
        return "before its part of the job ended" if self.over_at(site) else f"within {seconds:g} s"

    def needs_new_job(self, site: str) -> bool:
        """It found the server after this job began, or it is connected while its part of this job is dead or there is
        none: FLARE chooses a job's sites some seconds before it begins."""
        if self.started_again(site):
            return True
        chosen = {client.name for client in self.fl_ctx.get_engine().get_clients()}
        dead = site not in chosen or self.over_at(site) or self.get_client_disconnect_time(site)
        return bool(dead) and age(self.root / ALIVE / site) < FRESH


def age(file: Path) -> float:
    """Seconds since a file was written; for ever, if it was not."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return math.inf


def body(result: Shareable, number: int) -> object:
    """A site's answer to a request of round `number`, whatever it is; a failure that FLARE reports becomes a problem
    like any other."""
    code = result.get_return_code()
    if code == ReturnCode.OK:
        return result.get(BODY)
    why = "refused" if code == ReturnCode.TASK_RESULT_FILTER_ERROR else "failed"
    return encode({"kind": "problem", "round": number, "code": why})
