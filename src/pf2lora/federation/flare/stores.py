"""FLARE's stores in the server's own kit: which jobs wait, for how long, and what a full disk kept from being written.
In the server's main process; loads no torch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.job_def_manager import JobInfo, SimpleJobDefManager
from nvflare.apis.job_def import Job, JobMetaKey, RunStatus
from nvflare.apis.storage import StorageException
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage
from nvflare.fuel.sec.audit import AuditService

from pf2lora.federation.protocol.run_status import (
    CONTINUES,
    RUN,
    WAIT,
    Status,
    append_line,
    read_status,
    run_folder,
    write_status,
)

AWAITS, SINCE = (
    "pf2lora_awaits",
    "pf2lora_since",
)  # in a job's description: with whom it goes on; since when it waits
FULL = 1 << 20  # bytes: with less than that on the disk a run is not tried again
RETURN = (
    60.0  # seconds that a continuation waits for the sites that were there, which a restart keeps from it
)
COUNTED = 10  # tries of a job that waits: the pause between two is longest by then, and 2**1024 is more than FLARE can
STATUS, COUNT, HISTORY = (
    key.value for key in (JobMetaKey.STATUS, JobMetaKey.SCHEDULE_COUNT, JobMetaKey.SCHEDULE_HISTORY)
)


class JobStore(SimpleJobDefManager):
    """FLARE's job store, inside the server's own kit instead of the temporary folder."""

    def __init__(self) -> None:
        self.root = Path.cwd()  # FLARE starts in the server's kit
        super().__init__(uri_root=str(self.root / "store" / "jobs"))
        self.unwritten: dict[
            str, dict[str, Any]
        ] = {}  # of a job's description, what the disk had no room for

    # --- the queue ------------------------------------------------------------------------------------------

    def get_jobs_to_schedule(self, fl_ctx: FLContext) -> list[Job]:
        """Jobs that wait. A run that goes on comes before those that have not begun, and while it waits for its sites
        nobody overtakes it: for as long as its lead said."""
        try:
            waiting: list[Job] = super().get_jobs_to_schedule(fl_ctx)
        except (OSError, StorageException):  # FLARE leaves a mark at jobs that wait no more
            if not self.full():
                raise
            return []  # what it does not expect ends the thread that begins jobs
        for (
            job
        ) in waiting:  # there is no end to a run's waiting: FLARE's own is an error that stops all of them
            job.meta[COUNT] = min(job.meta.get(COUNT, 0), COUNTED)
            job.meta[HISTORY] = (job.meta.get(HISTORY) or [])[-COUNTED:]
        continued = sorted((job for job in waiting if CONTINUES in job.meta), key=submitted)
        continued = [job for job in continued if not self.waited_enough(job, fl_ctx)]
        if not continued:
            return [job for job in waiting if CONTINUES not in job.meta]
        there = {client.name for client in fl_ctx.get_engine().get_clients()}
        late = time.time() - submitted(continued[0]) > RETURN
        return continued[:1] if late or there.issuperset(continued[0].meta.get(AWAITS, ())) else []

    def waited_enough(self, job: Job, fl_ctx: FLContext) -> bool:
        """Whether a continuation found too few sites for as long as its lead would wait: then the run is stopped. While
        another run has the server, it waits for that."""
        wait = float((job.meta.get(RUN) or {}).get("wait", WAIT))
        if time.time() - float(job.meta.get(SINCE) or submitted(job)) <= wait:
            return False
        if self.get_jobs_by_status([RunStatus.DISPATCHED, RunStatus.RUNNING], fl_ctx):
            self.update_meta(job.job_id, {SINCE: time.time()}, fl_ctx)
            return False
        name = job.meta[JobMetaKey.JOB_NAME.value]
        folder = run_folder(self.root, name)
        status = read_status(folder) or Status("stopped", 0, 0)
        line = f"too few sites came back within {wait:g} s; `pf2lora federation resume {name}` goes on"
        self.set_status(job.job_id, RunStatus.FINISHED_CANT_SCHEDULE, fl_ctx)
        close(folder, status, "stopped", line)
        self.update_meta(job.job_id, {"pf2lora": asdict(status)}, fl_ctx)
        return True

    def get_all_jobs(self, fl_ctx: FLContext) -> list[Job]:
        """Every job. Where no site is connected FLARE does not ask which may begin: whoever looks finds what has waited
        enough stopped, too."""
        found: list[Job] = super().get_all_jobs(fl_ctx)
        queued = [job for job in found if CONTINUES in job.meta and job.meta[STATUS] == RunStatus.SUBMITTED]
        stopped = [job for job in queued if self.waited_enough(job, fl_ctx)]
        return super().get_all_jobs(fl_ctx) if stopped else found

    def clone(self, from_jid: str, meta: dict[str, Any], fl_ctx: FLContext) -> dict[str, Any]:
        """A job once more. FLARE's `clone_job` leaves out what it does not know: whom the run waits for."""
        before = self.get_job(from_jid, fl_ctx)
        kept = {RUN: before.meta[RUN]} if before is not None and RUN in before.meta else {}
        made: dict[str, Any] = super().clone(from_jid, kept | meta, fl_ctx)
        return made

    # --- a full disk ----------------------------------------------------------------------------------------

    def set_status(self, jid: str, status: RunStatus, fl_ctx: FLContext) -> None:
        """How a job stands. FLARE tries for ever to write down how one ended, and nothing else begins."""
        write = super().set_status
        self.write(jid, {STATUS: status.value}, lambda: write(jid, status, fl_ctx))

    def update_meta(self, jid: str, meta: dict[str, Any], fl_ctx: FLContext) -> None:
        """What is known of a job."""
        write = super().update_meta
        self.write(jid, meta, lambda: write(jid, meta, fl_ctx))

    def write(self, jid: str, meta: dict[str, Any], write: Callable[[], None]) -> None:
        """Write; where the disk is full, remember it until there is room."""
        try:
            write()
        except StorageException:
            if not self.full():
                raise
            self.unwritten.setdefault(jid, {}).update(meta)

    def full(self) -> bool:
        """Whether the kit's disk is."""
        return shutil.disk_usage(self.root).free < FULL

    def get_job(self, jid: str, fl_ctx: FLContext) -> Job | None:
        """A job, with what is not on the disk."""
        found: Job | None = super().get_job(jid, fl_ctx)
        if found is not None:
            found.meta.update(self.unwritten.get(jid, {}))
        return found

    def _scan(self, job_filter: Any, fl_ctx: FLContext, skip_tag: str | None = None) -> None:
        """FLARE's way through all jobs, likewise; what was not written is, if it can be."""
        if self.unwritten and not self.full():
            for jid, meta in list(self.unwritten.items()):
                with suppress(StorageException):
                    super().update_meta(jid, meta, fl_ctx)
                    del self.unwritten[jid]
        take = job_filter.filter_job

        def filter_job(info: JobInfo) -> bool:
            info.meta.update(self.unwritten.get(info.job_id, {}))
            return bool(take(info))

        job_filter.filter_job = filter_job
        super()._scan(job_filter, fl_ctx, skip_tag)


class SnapshotStore(FilesystemStorage):
    """FLARE's snapshots, likewise."""

    def __init__(self) -> None:
        folder = Path.cwd() / "store" / "snapshots"
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(root_dir=str(folder))


class PatientFile:
    """FLARE's own audit log, which it writes before each command of a person: on a full disk nobody could even ask how
    a run stands. What there was no room for stays in the file's buffer, as far as that reaches."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, text: str) -> None:
        """Add to it."""
        with suppress(OSError):
            self.file.write(text)

    def flush(self) -> None:
        """Write what is in the buffer."""
        with suppress(OSError):
            self.file.flush()

    def close(self) -> None:
        """Write the rest, and no more."""
        with suppress(OSError):
            self.file.close()


def answer_on_a_full_disk() -> None:
    """Have FLARE execute people's commands where it cannot log them."""
    auditor = AuditService.get_auditor()
    if auditor is not None and auditor.audit_file is not None:
        auditor.audit_file = PatientFile(auditor.audit_file)


def submitted(job: Job) -> float:
    """When a job was submitted."""
    return float(job.meta.get(JobMetaKey.SUBMIT_TIME.value) or 0.0)


def close(folder: Path, status: Status, state: str, line: str) -> None:
    """A run goes on no more, and why; on the disk, if there is room for it."""
    status.state, status.line = state, line
    with suppress(OSError):
        write_status(folder, status)
        append_line(folder, line)
