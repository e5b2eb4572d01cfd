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
from small_federation import make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.apis.server_engine_spec import ServerEngineSpec
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage
from nvflare.fuel.flare_api.api_spec import InternalError

from pf2lora.cli.federation_watch import changes, described
from pf2lora.errors import UserError
from pf2lora.federation.flare import admin, resumer
from pf2lora.federation.flare.resumer import CONTINUES, JobStore, RunResumer
from pf2lora.federation.protocol.removals import REMOVED
from pf2lora.federation.protocol.run_status import (
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
        engine.get_cell, engine.server = Mock(), Mock()
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

    def end(self, job: str) -> None:
        self.context.set_prop(FLContextKey.EVENT_DATA, {"job_id": job}, private=True, sticky=False)
        self.resumer.handle_event(EventType.JOB_COMPLETED, self.context)

    def status(self, job: str) -> str:
        return str(self.store.get_job(job, self.context).meta["status"])

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
    (server.root / REMOVED).write_text('{"disabled_clients": ["clinic-b"]}')

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

    monkeypatch.setattr(resumer, "write_status", full)
    server.end(job)
    assert server.waiting() == []
    told = server.store.get_job(job, server.context).meta["pf2lora"]
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
    server.job("first", RunStatus.FINISHED_COMPLETED, "continue")
    server.job("first", RunStatus.FINISHED_ABORTED)  # before it ran: FLARE tells nobody
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
    monkeypatch.setattr(resumer, "RETURN", -1.0)  # as if it had waited
    assert server.waiting() == [("first", dead)]


def test_a_site_that_was_away_at_the_end_is_served_when_it_registers(server: Server) -> None:
    first = server.job("first", RunStatus.FINISHED_COMPLETED, "finished")
    status = read_status(run_folder(server.root, "first"))
    assert status is not None
    status.absent = ["b"]
    write_status(run_folder(server.root, "first"), status)
    server.resumer.serve("a", server.context)
    assert server.waiting() == []
    server.resumer.serve("b", server.context)
    server.resumer.serve("b", server.context)  # it waits already
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
    server.resumer.serve("b", server.context)
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
    assert mean_loss({"a": told["a"]}) is None, "it would be that of a single site"


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
