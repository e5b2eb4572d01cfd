"""The server's main process, called directly: what goes on after a crash, a stop, a return. The store is real."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.job_def import RunStatus
from server_main import Server

from pf2lora.federation.flare import resumer, stores
from pf2lora.federation.protocol.removals import REMOVED
from pf2lora.federation.protocol.run_status import (
    LINES,
    RUN,
    SITES,
    Status,
    append_line,
    read_lines,
    read_status,
    run_folder,
    write_status,
)


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
