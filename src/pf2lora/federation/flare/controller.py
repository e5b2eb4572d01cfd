"""The server's side of FLARE: a controller around the server's session.

FLARE lets a restarted client join only the next job. So a run is a chain of jobs: when a lost site registers again,
the controller ends the current job at a round's end, and `resumer.py` submits its continuation.
"""

from __future__ import annotations

import fcntl
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

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
from pf2lora.federation.protocol import approvals, audit
from pf2lora.federation.protocol.agreement import DoesNotFit
from pf2lora.federation.protocol.masked import ask
from pf2lora.federation.protocol.messages import Malformed, encode
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.run_status import ALIVE, SITES, Status, append_line, run_folder, write_status
from pf2lora.federation.protocol.server import RoundRecord, ServerSession
from pf2lora.federation.protocol.stopping import QuorumMissed, early_stop
from pf2lora.run.evaluation import evaluation_rounds

PERIOD = 0.05  # seconds between looks at the tasks
FRESH = 30.0  # seconds within which a connected site was heard of
LOADING = 600.0  # seconds for a site to load its data and base model, at least


class FederationController(Controller):
    """The rounds of a plan, one FLARE task per site and message."""

    def __init__(self, plan: str) -> None:
        """`plan` is the run's plan as JSON, from the job."""
        super().__init__(task_check_period=PERIOD)
        self.plan = Plan.from_json(plan)
        self.present: list[str] = []
        self.changed = threading.Condition()
        self.awaited: set[str] = set()  # sites with a standing hello
        self.returned: dict[str, object] = {}  # those that answered it, with their answer
        self.status = Status("running", 0, self.plan.run.training.rounds)
        self.started = time.time()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Find the run's folder in the server's kit."""
        self.root = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_ROOT))
        self.folder = run_folder(self.root, self.plan.name)
        self.folder.mkdir(parents=True, exist_ok=True)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Everything is on disk already."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer after its round's end: too late to count."""
        append_line(
            self.folder,
            f"{client.name} answered after the deadline; it takes part again from the next round on",
        )

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Tell the lead's `status` where the run stands."""
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.add_info("pf2lora", self.status.__dict__ | {"run": self.plan.name})

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole job. Only one job at a time may work on a run."""
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
                known = approvals.digest(json.loads(self.plan.to_json()))
                audit.record(self.root, "run", job=self.status.job, run=self.plan.name, plan=known)
                self.collect_hellos()
                self.run_rounds()
            except UserError as error:
                append_line(self.folder, str(error))
                self.note("stopped" if isinstance(error, QuorumMissed) else "failed", str(error))

    def refuse(self, line: str) -> None:
        """This job ends, and leaves the run of its name as it is."""
        self.status.state, self.status.line = "failed", line
        write_status(self.folder, self.status, of_run=False)

    # --- who is there ---------------------------------------------------------------------------------------

    def collect_hellos(self) -> None:
        """Every connected site says what it brings. One that does not fit, or cannot take part, is left out and named;
        where no more sites fit together than do not, nobody can say who is right, and the run does not begin."""
        plan, known = self.plan, {c.name for c in self.fl_ctx.get_engine().get_clients()}
        connected = [s for s in plan.sites if s in known]
        append_line(
            self.folder,
            f"run {plan.name!r}: {len(connected)} of {len(plan.sites)} sites, rounds {self.session.done + 1} to "
            f"{plan.run.training.rounds}, deadline {plan.deadline:g} s, quorum {plan.quorum:g} of a round's sites",
        )
        timeout = max(LOADING, plan.deadline)
        answers = self.exchange("hello", dict.fromkeys(connected, self.session.hello()), timeout)
        misfits = []
        for site in self.session.agreeing_first(answers):
            try:
                self.admit(site, answers[site])
            except DoesNotFit as error:
                misfits.append(error)
        if self.session.done == 0 and len(misfits) >= max(1, len(self.present)):
            raise misfits[0]
        for site in connected:
            if site not in answers:
                self.drop(site, f"did not say hello within {timeout:g} s")
        if len(self.present) < plan.needed(len(plan.sites)):
            left_out = self.status.left_out
            missing = [s for s in plan.sites if s not in self.present and s not in left_out]
            raise QuorumMissed(self.session.done + 1, 0, len(plan.sites), plan, missing, left_out)

    def admit(self, site: str, data: object) -> None:
        """Take a site in by its hello. One that cannot be read leaves that site out, until it is started again; one
        with a problem, or that does not fit the others (`DoesNotFit`), is asked again."""
        try:
            self.session.register(site, data)
            self.present = [s for s in self.plan.sites if s in {*self.present, site}]
            self.status.left_out.pop(site, None)
        except Malformed as error:
            self.leave_out(
                site, f"its hello cannot be read ({error}); install the same version of pf2lora there"
            )
        except UserError as error:
            self.leave_out(site, str(error).removeprefix(f"{site} "))
            self.await_return(site)
            if isinstance(error, DoesNotFit):
                raise

    def leave_out(self, site: str, why: str) -> None:
        """Say, once, why a site takes no part."""
        if self.status.left_out.get(site) != why:
            append_line(self.folder, f"{site} is left out: {why}")
        self.status.left_out[site] = why

    def drop(self, site: str, why: str) -> None:
        """Later rounds do not wait for the site; a standing hello finds out when it is back."""
        self.present = [s for s in self.present if s != site]
        append_line(self.folder, f"{site} {why}; going on without it")
        self.await_return(site)

    def await_return(self, site: str) -> None:
        """Leave a hello without a time limit for a site; its answer is in `returned`."""
        if site not in self.awaited:
            self.awaited.add(site)
            self.post(
                "hello", site, self.session.hello(), 0, lambda data: self.returned.__setitem__(site, data)
            )

    def take_back(self) -> bool:
        """Take back who answered. True if one waits that only a new job can take back."""
        with self.changed:
            returned, self.returned = dict(self.returned), {}
        for site, data in returned.items():
            self.awaited.discard(site)
            with suppress(DoesNotFit):
                self.admit(site, data)
            if site in self.present:
                append_line(self.folder, f"{site} is back")
        for site in self.plan.sites:
            if site not in self.present and self.needs_new_job(site):
                append_line(self.folder, f"{site} is back: the run continues with it in a new job")
                return True
        return False

    def needs_new_job(self, site: str) -> bool:
        """It found the server after this job began, or it is connected while its part of this job is dead."""
        if age(self.root / SITES / site) < time.time() - self.started:
            return True
        return bool(self.get_client_disconnect_time(site)) and age(self.root / ALIVE / site) < FRESH

    # --- rounds ---------------------------------------------------------------------------------------------

    def run_rounds(self) -> None:
        """The rounds that are left, and the end; or, where a lost site waits for a new job, the end of this one."""
        session, config = self.session, self.plan.run
        measured = evaluation_rounds(config.training)
        while not session.over:
            if self.take_back():
                self.note("continue")
                return
            began = time.perf_counter()
            exchange = partial(self.exchange, timeout=self.plan.deadline)
            answers, summed = ask(session, self.present, measured, exchange)
            if self.abort.triggered:
                return
            missing = [s for s in session.chosen(session.done + 1) if s not in answers]
            for site in missing:
                if site in self.present:
                    self.drop(
                        site, f"did not answer round {session.done + 1} within {self.plan.deadline:g} s"
                    )
            record = session.finish_round(answers, time.perf_counter() - began, missing, summed)
            self.report(record)
        answers = self.exchange("finish", session.finish_requests(self.present), self.plan.final_deadline)
        if self.abort.triggered:
            return
        session.finish(answers)
        early = early_stop(config.training, session.done)
        append_line(
            self.folder, f"run {self.plan.name!r} finished: {session.done} rounds{early and '; ' + early}"
        )
        cost = session.spent()
        if cost is not None:
            append_line(self.folder, f"privacy: {cost.sentence()}")
        self.note("finished", early or ("" if cost is None else cost.sentence()))

    def report(self, record: RoundRecord) -> None:
        """Say how a round went; who told a problem is not asked again."""
        for site, why in record["refused"].items():
            append_line(self.folder, f"round {record['round']}: {site} is left out: {why}")
        for site in record["stopped"]:  # it has stopped, and returns when it is started again
            self.present = [s for s in self.present if s != site]
        answered = ", ".join(record["answered"])
        told = {key: record[key] for key in ("round", "answered", "missing", "refused")}
        audit.record(self.root, "round", job=self.status.job, run=self.plan.name, **told)
        append_line(
            self.folder,
            f"round {record['round']} of {self.plan.run.training.rounds}: {len(record['answered'])} answered "
            f"({answered}), {record['seconds']:.1f} s",
        )
        self.note("running")

    def note(self, state: str, line: str = "") -> None:
        """Write down where the run stands; `line` says why it ended."""
        self.status.state, self.status.line = state, line
        self.status.round, self.status.present = self.session.done, list(self.present)
        self.status.deadline, self.status.quorum = self.plan.deadline, self.plan.quorum
        write_status(self.folder, self.status)
        if state != "running":
            audit.record(self.root, state, job=self.status.job, run=self.plan.name, line=line)

    # --- messages over FLARE --------------------------------------------------------------------------------

    def exchange(self, name: str, requests: Mapping[str, bytes], timeout: float) -> dict[str, object]:
        """Send every site its request; what came back within `timeout` seconds."""
        answers: dict[str, object] = {}
        tasks = [
            self.post(name, site, data, math.ceil(timeout), partial(answers.__setitem__, site))
            for site, data in requests.items()
        ]
        until = time.monotonic() + timeout
        with self.changed:
            while len(answers) < len(requests) and time.monotonic() < until and not self.abort.triggered:
                self.changed.wait(timeout=min(0.5, max(0.01, until - time.monotonic())))
            found = dict(answers)
        for task in tasks:
            if task.completion_status is None and len(found) < len(requests):
                self.cancel_task(task, fl_ctx=self.fl_ctx)
        return found

    def post(
        self, name: str, site: str, data: bytes, seconds: int, deliver: Callable[[object], None]
    ) -> Task:
        """One FLARE task for one site, whose answer goes to `deliver`; `seconds` 0 waits for ever."""
        number = self.session.done + 1

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            with self.changed:
                deliver(body(client_task.result, number))
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


def body(result: Shareable, number: int) -> object:
    """A site's answer to a request of round `number`, whatever it is; a failure that FLARE reports becomes a problem
    like any other."""
    code = result.get_return_code()
    if code == ReturnCode.OK:
        return result.get(BODY)
    why = "refused" if code == ReturnCode.TASK_RESULT_FILTER_ERROR else "failed"
    return encode({"kind": "problem", "round": number, "code": why})
