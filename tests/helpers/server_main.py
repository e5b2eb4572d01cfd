"""A server's main process in a test: what resumes runs is real, and so is the job store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.apis.server_engine_spec import ServerEngineSpec
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage

from pf2lora.federation.flare.resumer import RunResumer
from pf2lora.federation.flare.stores import JobStore
from pf2lora.federation.protocol.run_status import (
    CONTINUES,
    Status,
    read_status,
    run_folder,
    write_status,
)


class Server:
    """A server's main process after a restart: its job store and what resumes runs."""

    def __init__(self, root: Path) -> None:
        self.store, self.resumer, self.root = JobStore(), RunResumer(), root
        parts = {"job_store": FilesystemStorage(), SystemComponents.JOB_MANAGER: self.store}
        self.there: list[str] = []  # sites that are connected
        clients = lambda: [SimpleNamespace(name=site) for site in self.there]  # noqa: E731
        engine = Mock(spec=ServerEngineSpec, get_component=parts.get, get_clients=clients)
        engine.get_cell, engine.server, self.engine = Mock(), Mock(), engine
        self.context = FLContext()
        self.context.get_engine = lambda: engine

    def job(
        self, name: str, status: RunStatus, run: str | None = None, at: int = 0, present: Sequence[str] = ()
    ) -> str:
        """A job in the store; `run` is the state of its run."""
        meta: dict[str, Any] = {"name": name, "min_clients": 2, "submitter_name": "lead@example.org"}
        job = str(self.store.create(meta, b"the job", self.context)["job_id"])
        self.store.set_status(job, status, self.context)
        if run is not None:
            folder = run_folder(self.root, name)
            folder.mkdir(parents=True, exist_ok=True)
            write_status(folder, Status(run, at, 9, job, present=list(present)))
        return job

    def start(self) -> None:
        self.resumer.handle_event(EventType.SYSTEM_START, self.context)

    def end(self, job: str, status: RunStatus | None = None) -> None:
        """The job ended; FLARE tells of one that was stopped twice."""
        if status is not None:
            self.store.set_status(job, status, self.context)
        self.context.set_prop(FLContextKey.EVENT_DATA, {"job_id": job}, private=True, sticky=False)
        if status in (RunStatus.FINISHED_ABORTED, RunStatus.FAILED_TO_RUN):
            self.resumer.handle_event(EventType.JOB_ABORTED, self.context)
        if status != RunStatus.FAILED_TO_RUN:
            self.resumer.handle_event(EventType.JOB_COMPLETED, self.context)

    def meta(self, job: str) -> dict[str, Any]:
        found = self.store.get_job(job, self.context)
        assert found is not None
        return dict(found.meta)

    def status(self, job: str) -> str:
        return str(self.meta(job)["status"])

    def run(self, name: str = "first") -> Status:
        found = read_status(run_folder(self.root, name))
        assert found is not None
        return found

    def heard(self, site: str, event: str) -> None:
        peer = FLContext()
        peer.get_identity_name = lambda *_, **__: site
        self.context.set_peer_context(peer)
        self.resumer.handle_event(event, self.context)

    def waiting(self) -> list[tuple[str, Any]]:
        """The runs that may be scheduled, and the jobs that they continue."""
        found = self.store.get_jobs_to_schedule(self.context)
        return [(job.meta["name"], job.meta.get(CONTINUES)) for job in found]
