"""The server's main process, called directly: what goes on after a crash, and in which order. The store is real."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hardship import full_disk
from small_federation import make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.apis.server_engine_spec import ServerEngineSpec
from nvflare.apis.storage import StorageException
from nvflare.app_common.job_schedulers.job_scheduler import SCHEDULE_RESULT_NO_RESOURCE, DefaultJobScheduler
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage
from nvflare.fuel.flare_api.api_spec import InternalError
from nvflare.fuel.sec.audit import Auditor, AuditService

from pf2lora.cli.federation_watch import changes, described
from pf2lora.errors import UserError
from pf2lora.federation.flare import admin, keys, resumer, stores
from pf2lora.federation.flare.resumer import RunResumer
from pf2lora.federation.flare.stores import JobStore
from pf2lora.federation.protocol.run_status import (
    CONTINUES,
    LINES,
    RUN,
    SITES,
    Status,
    append_line,
    mean_loss,
    read_lines,
    read_status,
    run_folder,
    write_status,
)
from pf2lora.federation.protocol.signed_plan import SignedPlan


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


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.chdir(tmp_path)
    return Server(tmp_path)


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.DISPATCHED])
@pytest.mark.parametrize("state", ["running", "continue", None])
def test_a_started_server_goes_on_with_what_had_not_ended(
    server: Server, status: RunStatus, state: str | None
) -> None:
    dead = server.job("first", status, state)
    server.start()
    assert server.status(dead) == "FINISHED:ABNORMAL"
    assert server.waiting() == [("first", dead)]
    kept = server.store.get_jobs_to_schedule(server.context)[0].meta
    assert (kept["min_clients"], kept["submitter_name"]) == (2, "lead@example.org")
    server.start()  # a second start finds it waiting
    assert server.waiting() == [("first", dead)]
    if state:
        assert read_lines(run_folder(server.root, "first")) == [
            "the server was started again: the run goes on"
        ]


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_what_had_ended_stays_so(server: Server, state: str) -> None:
    server.job("first", RunStatus.FINISHED_COMPLETED, state)
    server.start()
    assert server.waiting() == []


@pytest.mark.parametrize(
    "status",
    [RunStatus.FINISHED_COMPLETED, RunStatus.FINISHED_ABNORMAL, RunStatus.FINISHED_EXECUTION_EXCEPTION],
)
def test_a_run_whose_folder_was_cleaned_up_does_not_begin_anew(server: Server, status: RunStatus) -> None:
    server.job("first", status, "finished")
    shutil.rmtree(run_folder(server.root, "first"))
    server.start()
    assert server.waiting() == []


def test_a_mistyped_or_removed_site_is_refused_when_a_run_is_submitted(server: Server) -> None:
    (server.root / "local").mkdir()
    (server.root / "local" / "sites.json").write_text('["clinic-a", "clinic-b"]')
    (server.root / keys.REMOVED).write_text('{"disabled_clients": ["clinic-b"]}')

    def submitted(*sites: str) -> Any:
        server.context.set_prop(FLContextKey.JOB_BLOCK_REASON, None, private=True, sticky=False)
        meta = {"name": "first", RUN: {"sites": list(sites)}}
        server.context.set_prop(FLContextKey.JOB_META, meta, private=True, sticky=False)
        server.resumer.handle_event(EventType.SUBMIT_JOB, server.context)
        return server.context.get_prop(FLContextKey.JOB_BLOCK_REASON)

    assert submitted("clinic-a") is None
    assert submitted("clinic-a", "clinic-x").startswith("unknown site 'clinic-x'; did you mean 'clinic-")
    assert submitted("clinic-b").startswith("clinic-b was removed from this federation")


def test_a_queued_run_says_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("homlora", ("a", "b", "c"), quorum=1.0)
    connected = ["a", "z"]

    class Queue(Lead):
        def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
            with TemporaryDirectory() as folder:
                job = admin.write_job(plan, SignedPlan(plan.to_json()), Path(folder))
                meta = json.loads((job / "meta.json").read_text())
            return [meta | {"job_id": "x", "status": "SUBMITTED", "submit_time": 0}]

        def get_system_info(self) -> Any:
            return SimpleNamespace(client_info=[SimpleNamespace(name=site) for site in connected])

    monkeypatch.setattr(admin, "session", lambda kit: nullcontext(Queue(set())))
    (job,) = admin.runs(Path("kit"))
    assert described(job) == (
        "queued, round 0 of 3; 1 sites (a); it waits for sites, of which 3 are needed: b, c not connected"
    )
    connected += ["b", "c"]  # then it is another run that it waits for
    (job,) = admin.runs(Path("kit"))
    assert described(job) == "queued, round 0 of 3; 3 sites (a, b, c)"


@pytest.mark.parametrize(("sites", "most"), [(1, 22), (30, 80)])
def test_sites_that_come_back_one_by_one_do_not_end_a_run_but_one_that_gets_nowhere_ends(
    server: Server, sites: int, most: int
) -> None:
    folder = run_folder(server.root, "first")
    job = server.job("first", RunStatus.RUNNING, "continue", at=3)
    status = read_status(folder)
    assert status is not None
    status.returns = {f"site-{k}": 2 for k in range(sites)}
    for number in range(1, most + 2):
        write_status(folder, status)
        server.end(job)
        found = read_status(folder)
        assert found is not None and found.state == ("continue" if number <= most else "failed")


def test_a_full_disk_ends_a_run_at_once_and_the_lead_hears_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = server.job("first", RunStatus.RUNNING, "running", at=3)
    folder = run_folder(server.root, "first")
    monkeypatch.setattr(resumer.shutil, "disk_usage", lambda place: SimpleNamespace(free=512))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores, "write_status", full)
    server.end(job)
    assert server.waiting() == []
    told = server.meta(job)["pf2lora"]
    assert told["state"] == "stopped"
    assert told["line"] == (
        f"the disk of {folder} is full: free some space, then `pf2lora federation resume first` goes on"
    )


def test_a_line_that_a_full_disk_cut_off_is_passed_over(tmp_path: Path) -> None:
    append_line(tmp_path, "one")
    with (tmp_path / LINES).open("a") as lines:
        lines.write('{"time": 1, "li')
    append_line(tmp_path, "lost with it")
    append_line(tmp_path, "two")
    assert read_lines(tmp_path) == ["one", "two"]


def test_a_run_whose_continuation_the_lead_stopped_stays_stopped(server: Server) -> None:
    server.end(server.job("first", RunStatus.FINISHED_COMPLETED, "continue"))
    (queued,) = server.store.get_jobs_to_schedule(server.context)
    server.store.set_status(queued.job_id, RunStatus.FINISHED_ABORTED, server.context)  # FLARE tells nobody
    server.start()
    assert server.waiting() == []


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


def test_a_site_that_was_away_at_the_end_is_served_when_it_registers(server: Server) -> None:
    first = server.job("first", RunStatus.FINISHED_COMPLETED, "finished")
    status = read_status(run_folder(server.root, "first"))
    assert status is not None
    status.absent = ["b"]
    write_status(run_folder(server.root, "first"), status)
    server.resumer.serve("a", True, server.context)
    assert server.waiting() == []
    server.resumer.serve("b", True, server.context)
    server.resumer.serve("b", True, server.context)  # it waits already
    assert server.waiting() == [("first", None)]
    (job,) = server.store.get_jobs_to_schedule(server.context)
    assert job.min_sites == 1 and job.job_id != first


class Lead:
    """The lead's session with a server on which one job is dead and shown as running."""

    def __init__(self, dead: set[str], **jobs: str) -> None:
        self.dead, self.jobs, self.aborted = dead, jobs, list[str]()

    def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
        rows = enumerate(self.jobs.items())
        return [{"job_id": j, "name": "first", "status": s, "submit_time": i} for i, (j, s) in rows]

    def abort_job(self, job: str) -> None:
        if job in self.dead:
            raise InternalError("failed to abort job")
        self.aborted.append(job)


def test_a_site_that_registers_while_the_last_job_ends_is_served_too(server: Server) -> None:
    job = server.job("first", RunStatus.RUNNING, "finished")
    status = read_status(run_folder(server.root, "first"))
    assert status is not None
    status.absent = ["b", "c"]
    write_status(run_folder(server.root, "first"), status)
    server.resumer.heard("c", registered=True)
    os.utime(server.root / SITES / "c", (1, 1))  # long before the job: it was there, and did not answer
    server.resumer.heard("b", registered=True)
    os.utime(server.root / SITES / "b", (time.time() + 5, time.time() + 5))
    server.resumer.serve("b", True, server.context)
    assert server.waiting() == []  # the job is not over yet
    server.store.set_status(job, RunStatus.FINISHED_COMPLETED, server.context)
    server.end(job)
    assert server.waiting() == [("first", None)]


def test_a_run_is_watched_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    running = {"state": "running", "round": 1, "rounds": 3, "present": ["a", "b"], "loss": 0.5}
    ended = running | {"state": "finished", "round": 3, "left_out": {"b": "its disk is full"}}
    views = iter(
        [("SUBMITTED", None), ("RUNNING", running), ("RUNNING", running), ("FINISHED:COMPLETED", ended)]
    )

    class Watched(Lead):
        def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
            status, self.now = next(views)
            told = {"pf2lora": self.now} if status != "RUNNING" else {}
            return [{"job_id": "x", "name": "first", "status": status, "submit_time": 0} | told]

        def show_stats(self, job: str, target: str) -> dict[str, Any]:
            return {"server": {"pf2lora": self.now}}

    monkeypatch.setattr(admin, "session", lambda kit: nullcontext(Watched(set())))
    monkeypatch.setattr(admin, "LOOK", 0.0)
    assert list(changes(admin.follow(Path("kit"), "first"))) == [
        "submitted",
        "running, round 1 of 3; loss 0.5000; 2 sites (a, b)",
        "finished, round 3 of 3; loss 0.5000; 2 sites (a, b); b is left out: its disk is full",
    ]


def test_the_loss_of_a_round_is_the_mean_over_sites() -> None:
    told: dict[str, dict[str, Any]] = {
        "a": {"loss": 2.0, "steps": 4},
        "b": {"loss": 3.0, "steps": 2},
        "c": {"rows": 3},
    }
    assert mean_loss(told) == 1.0
    assert mean_loss({"a": {"steps": 2}}) is None


@pytest.mark.parametrize("dead", [{"a"}, {"b"}])
def test_a_dead_job_does_not_keep_the_live_one_from_being_stopped(
    dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Lead(dead, a="RUNNING", b="RUNNING", c="FINISHED:COMPLETED")
    monkeypatch.setattr(admin, "session", lambda kit: nullcontext(lead))
    assert admin.stop_run(Path("kit"), "first") == lead.aborted == sorted({"a", "b"} - dead)


def test_a_server_that_cannot_even_say_that_a_job_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "session", lambda kit: nullcontext(Lead({"a"}, a="RUNNING")))
    with pytest.raises(UserError, match=r"no process of job a.*is its disk full.*start it again"):
        admin.stop_run(Path("kit"), "first")


def test_stop_while_a_new_job_takes_over_stops_the_run_once(server: Server) -> None:
    job = server.job("first", RunStatus.RUNNING, "continue", at=3)
    server.end(job, RunStatus.FINISHED_ABORTED)
    assert server.waiting() == []
    assert server.run().line.startswith("stopped by an administrator") and server.run().state == "stopped"
    assert len(read_lines(run_folder(server.root, "first"))) == 1
    assert server.meta(job)["pf2lora"]["state"] == "stopped"


def test_a_continuation_that_cannot_be_begun_is_tried_again_but_not_for_ever(server: Server) -> None:
    """A site died just before the job was sent to it, and the others were too few."""
    server.end(
        server.job("first", RunStatus.RUNNING, "running", at=3), RunStatus.FINISHED_EXECUTION_EXCEPTION
    )
    for _ in range(resumer.TRIES - 1):
        (queued,) = server.store.get_jobs_to_schedule(server.context)
        server.end(queued.job_id, RunStatus.FAILED_TO_RUN)
        assert server.waiting() == [("first", queued.job_id)]
    (queued,) = server.store.get_jobs_to_schedule(server.context)
    server.end(queued.job_id, RunStatus.FAILED_TO_RUN)
    assert server.waiting() == [] and server.run().state == "failed"
    said = read_lines(run_folder(server.root, "first"))
    assert said.count("the run's next job could not be begun at enough of its sites") == 3


def test_a_job_that_fails_while_it_begins_was_stopped_by_nobody(server: Server) -> None:
    job = server.job("first", RunStatus.DISPATCHED, "running", at=3)
    server.end(job, RunStatus.FAILED_TO_RUN)
    assert server.waiting() == [("first", job)]


@pytest.mark.parametrize("other", [RunStatus.SUBMITTED, RunStatus.FINISHED_COMPLETED])
def test_another_plan_under_a_runs_name_does_not_take_its_place(server: Server, other: RunStatus) -> None:
    """It waits, or it was refused while the run went on."""
    mine = server.job("first", RunStatus.RUNNING, "running", at=3)
    theirs = server.job("first", other)
    if other != RunStatus.SUBMITTED:
        server.store.set_status(theirs, RunStatus.RUNNING, server.context)
        server.store.set_status(theirs, other, server.context)
        refused = Status(
            "failed", 0, 9, theirs, "the run 'first' goes on already in another job", refused=True
        )
        write_status(run_folder(server.root, "first"), refused, of_run=False)
        server.end(theirs)
    server.start()
    assert server.waiting() == [("first", mine)]


def test_resume_goes_on_with_the_run_and_not_with_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(Lead):
        def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
            return [{"name": "first"} | job for job in jobs]

        def clone_job(self, job: str) -> str:
            return f"clone of {job}"

    monkeypatch.setattr(admin, "session", lambda kit: nullcontext(Store(set())))
    over = {"status": "FINISHED:COMPLETED", "start_time": "2026-11-01"}
    stopped = over | {"pf2lora": {"state": "stopped"}}
    jobs = [
        stopped | {"job_id": "mine", "submit_time": 1},
        over | {"job_id": "refused", "submit_time": 2, "pf2lora": {"state": "failed", "refused": True}},
        {"job_id": "never", "submit_time": 3, "status": "FINISHED:ABORTED", "start_time": ""},
    ]
    assert admin.resume_run(Path("kit"), "first") == "clone of mine"
    jobs.append(jobs[-1] | {"job_id": "next", "submit_time": 4, CONTINUES: "mine"})
    assert admin.resume_run(Path("kit"), "first") == "clone of next"
    jobs[:] = [jobs[2]]
    assert admin.resume_run(Path("kit"), "first") == "clone of never"
    jobs[:] = [over | {"job_id": "x", "submit_time": 1, "pf2lora": {"refused": True, "line": "no such site"}}]
    with pytest.raises(UserError, match="has not begun: no such site"):
        admin.resume_run(Path("kit"), "first")


def test_a_site_that_is_heard_of_again_is_served_less_and_less_often(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE takes one back whose link was cut without having it register."""
    server.job("first", RunStatus.FINISHED_COMPLETED, "finished")
    status = server.run()
    status.absent = ["b"]
    write_status(run_folder(server.root, "first"), status)
    now, served_at = 0.0, list[float]()
    for pauses in (server.resumer.looks, server.resumer.served):
        monkeypatch.setattr(pauses, "clock", lambda: now)
    for now in map(float, range(0, 1000, 10)):
        server.heard("a", EventType.CLIENT_HEARTBEAT_PROCESSED)
        server.heard("b", EventType.CLIENT_HEARTBEAT_PROCESSED)
        for job in server.store.get_jobs_to_schedule(server.context):  # each time it comes to nothing
            served_at.append(now)
            server.store.set_status(job.job_id, RunStatus.FINISHED_COMPLETED, server.context)
    assert served_at == [0, 60, 180, 420, 900]
    server.heard("b", EventType.CLIENT_REGISTER_PROCESSED)
    assert server.waiting() == [("first", None)]  # at once


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
