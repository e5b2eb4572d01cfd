"""The server's side of FLARE: a controller around the server's session.

FLARE lets a restarted client join only the next job. So a run is a chain of jobs: when a lost site registers again,
the controller ends the current job at a round's end, and `resumer.py` submits its continuation.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import EventScope, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from pf2lora.errors import UserError
from pf2lora.federation.flare.admin import HANDED_OUT
from pf2lora.federation.flare.child import end_with
from pf2lora.federation.flare.gate import survive_bad_bytes
from pf2lora.federation.flare.presence import NewJob, Presence
from pf2lora.federation.protocol import approvals, audit
from pf2lora.federation.protocol.checkpoints import writing
from pf2lora.federation.protocol.fetched import handed_out
from pf2lora.federation.protocol.identity import Authority
from pf2lora.federation.protocol.masked import ask
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.records import RoundRecord
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.run_status import (
    append_line,
    mean_loss,
    read_status,
    run_folder,
    write_status,
)
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.signed_plan import PlanRefused, SignedPlan
from pf2lora.federation.protocol.stopping import QuorumMissed, early_stop
from pf2lora.run.rounds import evaluation_rounds, never_stops

LOOK = 0.5  # seconds between looks for sites that are missing


class FederationController(Presence):
    """The rounds of a plan, one FLARE task per site and message."""

    def __init__(self, plan: str, certificate: str = "", signature: str = "", signed_at: int = 0) -> None:
        """The run's plan as JSON, and who signed it when, from the job."""
        super().__init__(Plan.from_json(plan))
        self.signed = SignedPlan(plan, certificate, signature, signed_at)
        self.lead = ""  # who signed it
        self.missed: dict[int, float] = {}  # when a round first missed its quorum

    def current_round(self) -> int:
        """The round that is next."""
        return self.session.done + 1

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
        """Tell the lead's `status` where the run stands; the job's process ends with the server's."""
        if fl_ctx.get_prop(FLContextKey.EVENT_SCOPE) == EventScope.FEDERATION:
            return  # it came over the network
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            end_with(os.getppid())
            survive_bad_bytes()
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
                self.lead = self.signed.signer(self.authority).name
                self.remember(read_status(self.folder))
                self.session = ServerSession(self.plan, self.folder)
            except BlockingIOError:
                self.refuse(f"the run {self.plan.name!r} goes on already in another job")
                return
            except UserError as error:
                self.refuse(str(error))
                return
            try:
                self.check_lead()
                self.note("running")
                known = approvals.digest(json.loads(self.plan.to_json()))
                said = {"run": self.plan.name, "plan": known, "lead": self.lead}
                audit.record(self.root, "run", job=self.status.job, **said)
                self.patiently(self.collect_hellos)
                self.patiently(self.run_rounds)
            except NewJob:
                self.note("continue")
            except UserError as error:
                with suppress(OSError):  # on a full disk `resumer.py` says it, which sees this job end
                    append_line(self.folder, str(error))
                    may_go_on = isinstance(error, QuorumMissed | PlanRefused)
                    self.note("stopped" if may_go_on else "failed", str(error))

    def patiently(self, part: Callable[[], None]) -> None:
        """Do a part of the run. Where the quorum was missed for want of sites, wait for them as long as the plan says,
        and do it again."""
        while True:
            try:
                return part()
            except QuorumMissed as missed:
                if not missed.missing or not self.wait_for_sites(missed):
                    raise

    def check_lead(self) -> None:
        """`PlanRefused` where the lead was removed meanwhile, as nobody else could stop the run, or the certificate
        ended, as no site goes on then."""
        self.signed.lead(self.authority, removed(self.root))

    @property
    def authority(self) -> Authority:
        """By whose certificate the lead is known."""
        return Authority.of(self.root / "startup")

    def wait_for_sites(self, missed: QuorumMissed) -> bool:
        """Whether enough sites were back in the time that the plan gives a round below its quorum, however often it is
        tried; `NewJob` where one is that cannot take part in this one."""
        until = self.missed.setdefault(self.current_round(), time.monotonic()) + self.plan.wait
        left = until - time.monotonic()
        if left <= 0:
            return False
        line = f"{missed}; it waits for them up to {left:.0f} s"
        append_line(self.folder, line)
        self.note("waiting", line)
        while time.monotonic() < until and not self.abort.triggered:
            self.check_lead()
            self.take_back()
            asked = self.session.chosen(self.current_round())
            if sum(site in self.present for site in asked) >= self.plan.needed(len(asked)):
                self.note("running")
                return True
            time.sleep(LOOK)
        return False

    def refuse(self, line: str) -> None:
        """This job ends, and leaves the run of its name as it is."""
        self.status.state, self.status.line, self.status.refused = "failed", line, True
        with suppress(OSError):
            write_status(self.folder, self.status, of_run=False)

    # --- rounds ---------------------------------------------------------------------------------------------

    def run_rounds(self) -> None:
        """The rounds that are left, and the end; or, where a lost site waits for a new job, the end of this one."""
        session, config = self.session, self.plan.run
        measured = evaluation_rounds(config.training)
        if session.done == 0:
            for line in never_stops(config.training, measured, heard_after=1):
                append_line(self.folder, line)
        while not session.over:
            self.check_lead()
            self.take_back()
            began = time.perf_counter()
            exchange = partial(self.exchange, timeout=self.plan.deadline)
            answers, summed = ask(session, self.present, measured, exchange, self.root / "startup")
            if self.abort.triggered:
                return
            missing = [s for s in session.chosen(session.done + 1) if s not in answers]
            for site in missing:
                if site in self.present:
                    until = self.until(site, self.plan.deadline)
                    self.drop(site, f"did not answer round {session.done + 1} {until}")
            record = session.finish_round(answers, time.perf_counter() - began, missing, summed)
            self.answered(record["answered"])
            self.report(record)
        answers = self.exchange("finish", session.finish_requests(self.present), self.plan.final_deadline)
        if self.abort.triggered:
            return
        session.finish(answers)
        early = early_stop(config.training, session.done)
        append_line(
            self.folder, f"run {self.plan.name!r} finished: {session.done} rounds{early and '; ' + early}"
        )
        gone = removed(self.root)
        self.status.absent = [site for site in session.unserved() if site not in gone]
        if self.status.absent:
            away = ", ".join(self.status.absent)
            append_line(self.folder, f"without the last x: {away}; it is fetched when the site is back")
        cost = session.spent()
        if cost is not None:
            append_line(self.folder, f"privacy: {cost.sentence()}")
        self.hand_out()
        self.note("finished", early or ("" if cost is None else cost.sentence()))

    def hand_out(self) -> None:
        """Leave what the lead may fetch in the job's own folder, which FLARE keeps and sends."""
        workspace = self.fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        place = Path(workspace.get_result_root(self.fl_ctx.get_job_id())) / HANDED_OUT
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            for file in handed_out(self.folder):
                shutil.copy2(file, place)

    def report(self, record: RoundRecord) -> None:
        """Say how a round went; who told a problem is not asked again."""
        for site, why in record["refused"].items():
            append_line(self.folder, f"round {record['round']}: {site} is left out: {why}")
        for site in record["stopped"]:  # it has stopped, and returns when it is started again
            self.present = [s for s in self.present if s != site]
        self.status.loss, self.status.seconds = mean_loss(record["scores"]), record["seconds"]
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
        self.status.received, self.status.sent = self.bytes_received, self.bytes_sent
        write_status(self.folder, self.status)
        if state != "running":
            audit.record(self.root, state, job=self.status.job, run=self.plan.name, line=line)
