"""The server's side of FLARE: a controller around the session.

FLARE lets a restarted client join only the next job. So a run is a chain of jobs: when a lost site registers again,
the controller ends the current job at a round's end, and the keeper (`keeper.py`) submits its continuation.
"""

from __future__ import annotations

import fcntl
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from pf2lora.errors import UserError
from pf2lora.federation.flare.executor import BODY
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.run_status import ALIVE, SITES, Status, run_folder, say, write_status
from pf2lora.federation.protocol.server import QuorumMissed, ServerSession
from pf2lora.run.trial import evaluation_rounds

PERIOD = 0.05  # seconds between looks at the tasks
FRESH = 30.0  # seconds within which a connected site was heard of
LOADING = 600.0  # seconds for a site to load its data and base model, at least


class FederationController(Controller):
    """The rounds of a plan, one FLARE task per site and message."""

    def __init__(self, plan: str) -> None:
        super().__init__(task_check_period=PERIOD)
        self.plan = Plan.from_json(plan)
        self.present: list[str] = []
        self.changed = threading.Condition()
        self.back: dict[str, bytes] = {}  # sites that answered a knock, with their hello
        self.knocked: set[str] = set()
        self.status = Status("running", 0, self.plan.run.rounds)
        self.started = time.time()

    def start_controller(self, fl_ctx: FLContext) -> None:
        self.root = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_ROOT))
        self.folder = run_folder(self.root, self.plan.name)
        self.folder.mkdir(parents=True, exist_ok=True)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Everything is on disk already."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer after its round's end: too late to count."""
        say(
            self.folder,
            f"{client.name} answered after the deadline; it takes part again from the next round on",
        )

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.add_info("pf2lora", self.status.__dict__ | {"run": self.plan.name})

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self.abort, self.fl_ctx = abort_signal, fl_ctx
        self.status.job = fl_ctx.get_job_id()
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.session = ServerSession(self.plan, self.folder)
            except OSError:
                self.refuse(f"the run {self.plan.name!r} goes on already in another job")
                return
            except UserError as error:
                self.refuse(str(error))
                return
            try:
                self.note("running")
                self.gather()
                self.go()
            except UserError as error:
                say(self.folder, str(error))
                self.note("stopped" if isinstance(error, QuorumMissed) else "failed", str(error))

    def refuse(self, line: str) -> None:
        """This job ends, and leaves the run of its name as it is."""
        self.status.state, self.status.line = "failed", line
        write_status(self.folder, self.status, of_run=False)

    # --- who is there ---------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Every connected site says what it brings; what does not fit is named before the first round."""
        plan, known = self.plan, {c.name for c in self.fl_ctx.get_engine().get_clients()}
        connected = [s for s in plan.sites if s in known]
        say(
            self.folder,
            f"run {plan.name!r}: {len(connected)} of {len(plan.sites)} sites, rounds {self.session.done + 1} to "
            f"{plan.run.rounds}, deadline {plan.deadline:g} s, quorum {plan.quorum:g} of a round's sites",
        )
        hello = messages.encode({"kind": "hello", "round": self.session.done + 1})
        patience = max(LOADING, plan.deadline)
        answers = self.exchange("hello", dict.fromkeys(connected, hello), patience)
        for site, data in answers.items():
            self.admit(site, data, fatal=self.session.done == 0)
        for site in connected:
            if site not in answers:
                self.lose(site, f"did not say hello within {patience:g} s")
        if len(self.present) < plan.needed(len(plan.sites)):
            raise QuorumMissed(
                self.session.done + 1,
                0,
                len(plan.sites),
                plan,
                [s for s in plan.sites if s not in self.present],
                {},
            )

    def admit(self, site: str, data: bytes, fatal: bool) -> None:
        try:
            self.session.welcome(site, data)
            self.present = [s for s in self.plan.sites if s in {*self.present, site}]
        except UserError as error:
            if fatal:
                raise
            say(self.folder, f"{error}; going on without {site}")
            self.knock(site)

    def lose(self, site: str, why: str) -> None:
        """Later rounds do not wait for it; a standing question finds out when it is back."""
        self.present = [s for s in self.present if s != site]
        say(self.folder, f"{site} {why}; going on without it")
        self.knock(site)

    def knock(self, site: str) -> None:
        if site not in self.knocked:
            self.knocked.add(site)
            hello = messages.encode({"kind": "hello", "round": self.session.done + 1})
            self.post("hello", site, hello, 0, lambda data: self.back.__setitem__(site, data))

    def returned(self) -> bool:
        """Take back who answered. True if one waits that only a new job can take back."""
        with self.changed:
            back, self.back = dict(self.back), {}
        for site, data in back.items():
            self.knocked.discard(site)
            self.admit(site, data, fatal=False)
            if site in self.present:
                say(self.folder, f"{site} is back")
        for site in self.plan.sites:
            if site not in self.present and self.waits(site):
                say(self.folder, f"{site} is back: the run continues with it in a new job")
                return True
        return False

    def waits(self, site: str) -> bool:
        """It found the server after this job began, or it is connected while its part of this job is dead."""
        if age(self.root / SITES / site) < time.time() - self.started:
            return True
        return bool(self.get_client_disconnect_time(site)) and age(self.root / ALIVE / site) < FRESH

    # --- rounds ---------------------------------------------------------------------------------------------

    def go(self) -> None:
        session, config = self.session, self.plan.run
        measured = evaluation_rounds(config)
        while session.done < config.rounds:
            if self.returned():
                self.note("continue")
                return
            began = time.perf_counter()
            requests = session.requests(self.present, measured)
            answers = self.exchange("round", requests, self.plan.deadline)
            if self.abort.triggered:
                return
            missing = [s for s in session.chosen(session.done + 1) if s not in answers]
            for site in missing:
                if site in self.present:
                    self.lose(
                        site, f"did not answer round {session.done + 1} within {self.plan.deadline:g} s"
                    )
            record = session.finish_round(answers, time.perf_counter() - began, missing)
            self.report(record)
        answers = self.exchange("finish", session.farewell(self.present), self.plan.deadline)
        if self.abort.triggered:
            return
        session.finish(answers)
        say(self.folder, f"run {self.plan.name!r} finished: {config.rounds} rounds")
        self.note("finished")

    def report(self, record: Mapping[str, Any]) -> None:
        for site, why in record["refused"].items():
            say(self.folder, f"round {record['round']}: {site} is left out: {why}")
        for site in record["stopped"]:  # it has stopped, and returns when it is started again
            self.present = [s for s in self.present if s != site]
        answered = ", ".join(record["answered"])
        say(
            self.folder,
            f"round {record['round']} of {self.plan.run.rounds}: {len(record['answered'])} answered ({answered}), "
            f"{record['seconds']:.1f} s",
        )
        self.note("running")

    def note(self, state: str, line: str = "") -> None:
        self.status.state, self.status.line = state, line
        self.status.round, self.status.present = self.session.done, list(self.present)
        self.status.deadline, self.status.quorum = self.plan.deadline, self.plan.quorum
        write_status(self.folder, self.status)

    # --- messages over FLARE --------------------------------------------------------------------------------

    def exchange(self, name: str, messages: Mapping[str, bytes], patience: float) -> dict[str, bytes]:
        """Send every site its message; what came back within `patience` seconds."""
        answers: dict[str, bytes] = {}
        tasks = [
            self.post(name, site, data, math.ceil(patience), partial(answers.__setitem__, site))
            for site, data in messages.items()
        ]
        until = time.monotonic() + patience
        with self.changed:
            while len(answers) < len(messages) and time.monotonic() < until and not self.abort.triggered:
                self.changed.wait(timeout=min(0.5, max(0.01, until - time.monotonic())))
            found = dict(answers)
        for task in tasks:
            if task.completion_status is None and len(found) < len(messages):
                self.cancel_task(task, fl_ctx=self.fl_ctx)
        return found

    def post(self, name: str, site: str, data: bytes, seconds: int, deliver: Callable[[bytes], None]) -> Task:
        """One FLARE task for one site; `seconds` 0 waits for ever."""

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            with self.changed:
                deliver(body(client_task.result, data))
                self.changed.notify_all()

        task = Task(name=name, data=Shareable({BODY: data}), timeout=seconds, result_received_cb=received)
        self.send(task, self.fl_ctx, targets=[site])
        return task


def age(file: Path) -> float:
    """Seconds since a file was written; for ever, if it was not."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return math.inf


def body(result: Shareable, request: bytes) -> bytes:
    """A site's answer; a failure that FLARE reports becomes a problem like any other."""
    code = result.get_return_code()
    data = result.get(BODY)
    if code == ReturnCode.OK and isinstance(data, bytes):
        return data
    why = "refused" if code == ReturnCode.TASK_RESULT_FILTER_ERROR else "failed"
    return messages.encode(
        {"kind": "problem", "round": messages.decode(request).fields["round"], "code": why}
    )
