"""Which jobs of the server begin, in which order, after how long, and what a full disk does to its stores."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hardship import full_disk

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.job_def import RunStatus
from nvflare.apis.storage import StorageException
from nvflare.app_common.job_schedulers.job_scheduler import SCHEDULE_RESULT_NO_RESOURCE, DefaultJobScheduler
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage
from nvflare.fuel.sec.audit import Auditor, AuditService
from server_main import Server

from pf2lora.federation.flare import stores
from pf2lora.federation.flare.stores import JobStore
from pf2lora.federation.protocol.run_status import RUN


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.chdir(tmp_path)
    return Server(tmp_path)


def test_a_queued_run_does_not_overtake_a_continuation(server: Server) -> None:
    first = server.job("first", RunStatus.RUNNING, "continue", at=3)
    server.job("second", RunStatus.SUBMITTED)
    assert server.waiting() == [("second", None)]
    server.store.set_status(first, RunStatus.FINISHED_COMPLETED, server.context)
    server.end(first)
    assert server.waiting() == [("first", first)]  # alone: while it waits for its sites, nobody overtakes it


def test_a_continuation_waits_a_while_for_the_sites_that_were_there(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without, a restarted server would begin with whoever finds it first, and the others miss a round."""
    dead = server.job("first", RunStatus.RUNNING, "running", present=["a", "b"])
    server.job("second", RunStatus.SUBMITTED)
    server.there = ["a"]
    server.start()
    assert server.waiting() == []
    server.there = ["b", "c", "a"]
    assert server.waiting() == [("first", dead)]
    server.there = ["a"]
    monkeypatch.setattr(stores, "RETURN", -1.0)  # as if it had waited
    assert server.waiting() == [("first", dead)]


def test_waiting_has_no_end_in_flares_arithmetic(server: Server) -> None:
    """2 to the power of the tries, as a float: after 1024 of them no job of the server was ever begun."""
    old, new = (server.job(name, RunStatus.SUBMITTED) for name in ("old", "new"))
    history = [f"try {k}" for k in range(5000)]
    server.store.update_meta(old, {"schedule_count": 5000, "schedule_history": history}, server.context)
    scheduler, tried = DefaultJobScheduler(1, 10000, 1.0, 10.0), list[str]()

    def try_job(job: Any, context: Any) -> tuple[int, None, str]:
        tried.append(job.job_id)
        return SCHEDULE_RESULT_NO_RESOURCE, None, "too few sites"

    scheduler._try_job = try_job
    server.engine.new_context = lambda: nullcontext(server.context)
    scheduler.schedule_job(server.store, server.store.get_jobs_to_schedule(server.context), server.context)
    assert tried == [old, new]
    assert server.meta(old)["schedule_count"] < 20 and len(server.meta(old)["schedule_history"]) < 20
    assert server.status(old) == "SUBMITTED"


def test_a_continuation_blocks_others_no_longer_than_its_lead_would_wait(server: Server) -> None:
    first = server.job("first", RunStatus.RUNNING, "running", at=3)
    server.store.update_meta(first, {RUN: {"sites": ["a"], "wait": 600.0}}, server.context)
    server.end(first, RunStatus.FINISHED_ABNORMAL)
    (queued,) = server.store.get_jobs_to_schedule(server.context)
    server.job("second", RunStatus.SUBMITTED)
    assert server.waiting() == [("first", first)]
    long_ago = {"submit_time": time.time() - 601}
    server.store.update_meta(queued.job_id, long_ago, server.context)
    other = server.job("third", RunStatus.RUNNING)
    assert server.waiting() == [("first", first)]  # it is another run that it waited for
    server.store.update_meta(queued.job_id, {stores.SINCE: time.time() - 601}, server.context)
    server.store.set_status(other, RunStatus.FINISHED_COMPLETED, server.context)
    server.store.get_all_jobs(server.context)  # the lead looks; no site is there
    assert server.run().state == "stopped" and server.meta(queued.job_id)["pf2lora"]["state"] == "stopped"
    assert server.run().line == (
        "too few sites came back within 600 s; `pf2lora federation resume first` goes on"
    )
    assert server.status(queued.job_id) == "FINISHED:CAN_NOT_SCHEDULE"
    server.start()
    assert [name for name, _ in server.waiting()] == ["second"]


def test_a_job_that_is_cloned_says_whom_it_waits_for(server: Server) -> None:
    job = server.job("first", RunStatus.FINISHED_ABORTED)
    server.store.update_meta(job, {RUN: {"sites": ["a", "b"]}}, server.context)
    cloned = server.store.clone(job, {"name": "first", "cloned_from": job}, server.context)  # as FLARE does
    assert server.meta(str(cloned["job_id"]))[RUN] == {"sites": ["a", "b"]}


def test_a_full_disk_does_not_keep_a_dead_job_running(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE would try for ever to write down that it ended, and begin nothing else."""
    job, free = server.job("first", RunStatus.RUNNING, "running", at=3), 512
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    with full_disk(monkeypatch):
        server.end(job, RunStatus.FINISHED_EXECUTION_EXCEPTION)
        (listed,) = server.store.get_all_jobs(server.context)
        assert listed.meta["status"] == server.status(job) == "FINISHED:EXECUTION_EXCEPTION"
        assert "is full: free some space" in listed.meta["pf2lora"]["line"]
        assert server.waiting() == []
        monkeypatch.setattr(FilesystemStorage, "tag_object", Mock(side_effect=OSError(28, "No space left")))
        assert server.waiting() == []
    free = 1 << 30
    server.store.get_all_jobs(server.context)
    assert server.store.unwritten == {} and JobStore().get_all_jobs(server.context)[0].meta == server.meta(
        job
    )
    with full_disk(monkeypatch), pytest.raises(StorageException):  # it is something else then
        server.store.set_status(job, RunStatus.FINISHED_ABORTED, server.context)


def test_people_are_answered_where_flare_cannot_log_what_they_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor = Auditor(str(tmp_path / "log"))
    monkeypatch.setattr(AuditService, "the_auditor", auditor)
    stores.answer_on_a_full_disk()
    AuditService.add_event("lead", "list_jobs")
    auditor.audit_file.close()
    with Path("/dev/full").open("a") as auditor.audit_file:
        with pytest.raises(OSError, match="No space left"):
            AuditService.add_event("lead", "list_jobs")
        stores.answer_on_a_full_disk()
        for _ in range(1000):  # more than a buffer holds
            AuditService.add_event("lead", "list_jobs")
        AuditService.close()
    assert "list_jobs" in (tmp_path / "log").read_text()
