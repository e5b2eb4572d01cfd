"""What lives in the server's main process and continues unfinished runs. Loads no torch."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import EventScope, FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import NotAuthenticated
from nvflare.apis.job_def import Job, JobMetaKey, RunStatus

from pf2lora.errors import UserError
from pf2lora.federation import require_nvflare
from pf2lora.federation.flare.doubles import Connections
from pf2lora.federation.flare.gate import guard, tell
from pf2lora.federation.flare.keys import check_known
from pf2lora.federation.flare.logins import RemovedPeople, in_place, keep_out
from pf2lora.federation.flare.stores import (
    AWAITS,
    FULL,
    JobStore,
    SnapshotStore,
    answer_on_a_full_disk,
    close,
    submitted,
)
from pf2lora.federation.protocol.names import is_person
from pf2lora.federation.protocol.pauses import Pauses
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.run_status import (
    ALIVE,
    CONTINUES,
    RUN,
    SITES,
    UNFINISHED,
    Status,
    append_line,
    job_of_run,
    read_status,
    run_folder,
)

__all__ = ["JobStore", "RunResumer", "SnapshotStore"]  # kits name the stores here

# Continuations without a finished round in between: of jobs that died; of sites that came back, and each of these may
# twice before it has to wait (`presence.py`).
TRIES, RETURNS = 3, 20
STARTING = 30.0  # seconds in which FLARE's server gets the part that reads commands
AGAIN = 60.0  # seconds between looks for a site that is heard of, and until it is served again; then twice as long


class RunResumer(FLComponent):
    """Lives in the server's main process: notes who registers, and continues a run that is not finished."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path.cwd()  # FLARE starts in the server's kit
        self.seen: set[str] = set()  # sites heard of since this server started
        self.connections = Connections()
        self.told: set[str] = set()  # removed sites that were spoken of
        self.people, self.began = RemovedPeople(self.root, self.tell_removed), time.monotonic()
        self.tries: dict[str, tuple[int, int]] = {}  # run: (finished rounds, continuations since)
        self.looks, self.served = Pauses(), Pauses()  # at sites that are heard of; of a site and a run

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE's events: the server was started, a site was heard of, a job ended. None that came over the network."""
        if fl_ctx.get_prop(FLContextKey.EVENT_SCOPE) == EventScope.FEDERATION:
            return
        if event_type == EventType.SYSTEM_START:
            self.started(fl_ctx)
        elif event_type == EventType.CLIENT_REGISTER_RECEIVED:
            self.check_commands(fl_ctx)
            peer = fl_ctx.get_peer_context()
            if peer and peer.get_identity_name():
                self.refuse_removed(peer.get_identity_name())
                self.refuse_double(peer.get_identity_name())
        elif event_type in (EventType.CLIENT_REGISTER_PROCESSED, EventType.CLIENT_HEARTBEAT_PROCESSED):
            self.check_commands(fl_ctx)
            peer = fl_ctx.get_peer_context()
            if peer and peer.get_identity_name():
                self.turn_away(peer.get_identity_name(), fl_ctx)
                registered = event_type == EventType.CLIENT_REGISTER_PROCESSED
                self.heard(peer.get_identity_name(), registered)
                self.serve(peer.get_identity_name(), registered, fl_ctx)
        elif event_type == EventType.SUBMIT_JOB:
            self.check_submission(fl_ctx)
        elif event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED):
            self.job_ended(fl_ctx.get_prop(FLContextKey.EVENT_DATA)[JobMetaKey.JOB_ID.value], fl_ctx)

    def started(self, fl_ctx: FLContext) -> None:
        """What ran when the server ended runs no longer, whatever the store says; runs that were not at their end go
        on."""
        engine = fl_ctx.get_engine()
        guard(self.root, engine)
        answer_on_a_full_disk()
        keep_out(engine.server, self.people)
        # FLARE has read its list of removed names, and would write its own over ours, without those removed since.
        engine.server.client_manager.set_disabled_clients_file("")
        engine.get_cell().core_cell.set_cell_disconnected_cb(
            lambda cell: self.connections.closed(cell.get_fqcn())
        )
        manager = engine.get_component(SystemComponents.JOB_MANAGER)
        dead = manager.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx)
        for job in dead:
            manager.set_status(job.job_id, RunStatus.FINISHED_ABNORMAL, fl_ctx)
        died = {job.job_id for job in dead}
        of_name: dict[str, list[Job]] = {}
        for job in sorted(manager.get_all_jobs(fl_ctx), key=submitted, reverse=True):
            of_name.setdefault(job.meta[JobMetaKey.JOB_NAME.value], []).append(job)
        for name, jobs in of_name.items():
            folder = run_folder(self.root, name)
            status = read_status(folder)
            described = job_of_run([with_refusal(folder, job) for job in jobs])
            if described is None:
                continue
            job_id, state = described[JobMetaKey.JOB_ID.value], described[JobMetaKey.STATUS.value]
            # Without a status: it died before it wrote one, or it is long over and its folder was cleaned up.
            unfinished = status.state in UNFINISHED if status else job_id in died
            if unfinished and state not in (RunStatus.SUBMITTED, RunStatus.FINISHED_ABORTED):
                if status is not None:
                    append_line(folder, "the server was started again: the run goes on")
                self.continue_job(job_id, status.present if status else [], fl_ctx)

    def check_commands(self, fl_ctx: FLContext) -> None:
        """The server ends where removed people could go on: when somebody registers, as people do before they log in,
        or a heart beats. (Who was removed before it was started, FLARE itself keeps out.)"""
        if time.monotonic() - self.began > STARTING and not in_place(fl_ctx.get_engine().server, self.people):
            line = f"the server ends: nvflare {require_nvflare()} does not let pf2lora refuse removed people"
            print(f"pf2lora: {line}; install the version in constraints.txt", file=sys.stderr, flush=True)
            os._exit(1)  # from a thread of FLARE's, which would catch an exception

    def check_submission(self, fl_ctx: FLContext) -> None:
        """A run that names a site that there is none of is refused when it is submitted, in a line that the lead reads:
        FLARE would have it wait for ever where the quorum needs that site."""
        described = (fl_ctx.get_prop(FLContextKey.JOB_META) or {}).get(RUN)
        sites = described.get("sites", []) if isinstance(described, dict) else []
        try:
            gone = [site for site in sites if site in removed(self.root)]
            if gone:
                raise UserError(f"{gone[0]} was removed from this federation: leave it out of --sites")
            check_known(self.root, sites)
        except UserError as error:
            fl_ctx.set_prop(FLContextKey.JOB_BLOCK_REASON, str(error), private=True, sticky=False)

    def turn_away(self, site: str, fl_ctx: FLContext) -> None:
        """A site that was removed while the server runs loses its registration: FLARE reads its list at the start."""
        if site in removed(self.root):
            fl_ctx.get_engine().server.client_manager.disable_client(site)

    def heard(self, site: str, registered: bool) -> None:
        """A site found this server: it registered, or its heartbeat goes on after the server was started again. One
        that registers while it is heard of may be two: that is said aloud."""
        if registered and not is_person(site) and self.connections.heard_lately(site):
            line = (
                f"{site} registered while it was heard of: it was started again, or somebody else has its kit"
            )
            self.say("registered twice", site, line)
        self.connections.heard(site)
        if registered or site not in self.seen:
            note(self.root / SITES, site)
        note(self.root / ALIVE, site)
        self.seen.add(site)

    def refuse_removed(self, site: str) -> None:
        """One who was removed is told so when it registers; FLARE alone would let it ask again for ever, in silence."""
        if site in removed(self.root) and not is_person(site):  # people are, when they log in
            self.tell_removed(site)
            raise NotAuthenticated(f"{site} was refused: it was removed")

    def tell_removed(self, name: str) -> None:
        """Say, once, that a removed site or person came: they may come again and again."""
        if name not in self.told:
            self.told.add(name)
            self.say("refused", name, f"{name} was refused: it was removed")

    def refuse_double(self, site: str) -> None:
        """One who registers as a site that is connected and heard of has a copy of its kit: FLARE refuses it for this
        exception, and tells it so. People may look from two places at once."""
        if not is_person(site) and self.connections.lives(site):
            self.connections.refused(site)
            line = f"a second {site} was refused: one is connected already. Does somebody else have its kit?"
            self.say("refused a second", site, line)
            raise NotAuthenticated(line)

    def say(self, event: str, who: str, line: str) -> None:
        """Aloud, and in the audit log."""
        tell(self.root, event, who, line)

    def serve(self, site: str, registered: bool, fl_ctx: FLContext) -> None:
        """A site that was away at the end of a run gets its last x: when it registers, or is heard of again after its
        link was cut."""
        if not registered and not self.looks.over(site):
            return
        self.looks.clear(site)
        self.looks.add(site, AGAIN)
        manager = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)
        active = manager.get_jobs_by_status(
            [RunStatus.SUBMITTED, RunStatus.DISPATCHED, RunStatus.RUNNING], fl_ctx
        )
        names = {job.meta[JobMetaKey.JOB_NAME.value] for job in active}
        for folder in sorted((self.root / "runs").glob("*")):
            status = read_status(folder)
            pause = f"{site}/{folder.name}"
            if (
                status
                and status.state == "finished"
                and site in status.absent
                and folder.name not in names
                and (registered or self.served.over(pause))
            ):
                self.served.add(pause, AGAIN)
                meta = self.carried(status.job, fl_ctx) | {JobMetaKey.MIN_CLIENTS.value: 1}
                manager.clone(status.job, meta, fl_ctx)

    def serve_returned(self, status: Status, fl_ctx: FLContext) -> None:
        """A site may have come back between the run's end and its job's."""
        began = submitted(
            fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER).get_job(status.job, fl_ctx)
        )
        for site in status.absent:
            file = self.root / SITES / site
            if file.exists() and file.stat().st_mtime > began:
                self.serve(site, True, fl_ctx)

    def tell_lead(self, job: str, status: Status, fl_ctx: FLContext) -> None:
        """How a job ended, for the lead's `status`."""
        manager = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)
        manager.update_meta(job, {"pf2lora": asdict(status)}, fl_ctx)

    def job_ended(self, job_id: str, fl_ctx: FLContext) -> None:
        """A job ended, or did not begin: go on with its run, and tell the lead."""
        job = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER).get_job(job_id, fl_ctx)
        if job is None:
            return
        state = job.meta[JobMetaKey.STATUS.value]
        for folder in sorted((self.root / "runs").glob("*")):
            status = read_status(folder)
            if status is not None and status.job == job_id:
                self.ended(folder, status, job_id, state, fl_ctx)
                self.serve_returned(status, fl_ctx)
            elif status is not None and state == RunStatus.FAILED_TO_RUN and goes_on_with(job, folder):
                append_line(folder, "the run's next job could not be begun at enough of its sites")
                self.ended(folder, status, job_id, state, fl_ctx)
            else:
                status = read_status(folder, job_id)
            if status is not None:
                self.tell_lead(job_id, status, fl_ctx)

    def ended(self, folder: Path, status: Status, job: str, state: str, fl_ctx: FLContext) -> None:
        """A job of a run ended, in FLARE's words `state`, which it tells twice where a job was stopped. Continue the
        run, unless it is finished, was stopped, or gets nowhere."""
        again = f"`pf2lora federation resume {folder.name}` goes on"
        if state == RunStatus.FINISHED_ABORTED and status.state in UNFINISHED:
            close(folder, status, "stopped", f"stopped by an administrator; {again}")
        elif status.state in UNFINISHED and shutil.disk_usage(folder).free < FULL:
            close(folder, status, "stopped", f"the disk of {folder} is full: free some space, then {again}")
        elif status.state in UNFINISHED:
            done, tries = self.tries.get(folder.name, (-1, 0))
            tries = tries + 1 if done == status.round else 1
            self.tries[folder.name] = (status.round, tries)
            most = RETURNS + 2 * len(status.returns) if status.state == "continue" else TRIES
            if tries > most:
                close(
                    folder, status, "failed", f"{most} jobs in a row finished no round; see the server's log"
                )
            else:
                self.continue_job(job, status.present, fl_ctx)

    def continue_job(self, ended: str, sites: list[str], fl_ctx: FLContext) -> None:
        """Submit the job that ended once more, in its submitter's name, for the `sites` that were there."""
        manager = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)
        manager.clone(ended, self.carried(ended, fl_ctx) | {CONTINUES: ended, AWAITS: sites}, fl_ctx)

    def carried(self, ended: str, fl_ctx: FLContext) -> dict[str, Any]:
        """What a job has of one that it goes on with."""
        job = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER).get_job(ended, fl_ctx)
        return {key: job.meta[key] for key in (RUN, *(key.value for key in CARRIED)) if key in job.meta}


def goes_on_with(job: Job, folder: Path) -> bool:
    """Whether a job continues the run of a folder."""
    return CONTINUES in job.meta and folder.name == job.meta[JobMetaKey.JOB_NAME.value]


def with_refusal(folder: Path, job: Job) -> dict[str, Any]:
    """A job's description, with how it ended as its own controller said it."""
    status = read_status(folder, job.job_id)
    return {**job.meta, "pf2lora": asdict(status) if status else None}


def note(folder: Path, site: str) -> None:
    """A file of the site's name whose age says when it was last heard of; nothing is in it."""
    folder.mkdir(exist_ok=True)
    (folder / os.path.basename(site)).touch()


CARRIED = (
    JobMetaKey.JOB_NAME,
    JobMetaKey.JOB_FOLDER_NAME,
    JobMetaKey.DEPLOY_MAP,
    JobMetaKey.RESOURCE_SPEC,
    JobMetaKey.MIN_CLIENTS,
    JobMetaKey.DATA_STORAGE_FORMAT,
    JobMetaKey.SCOPE,
    JobMetaKey.STUDY,
    JobMetaKey.SUBMITTER_NAME,
    JobMetaKey.SUBMITTER_ORG,
    JobMetaKey.SUBMITTER_ROLE,
)
