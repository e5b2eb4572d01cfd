"""What the lead is told of runs, and what stop and resume do, without a server."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from small_federation import make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.fuel.flare_api.api_spec import InternalError

from pf2lora.cli.federation_watch import changes, described
from pf2lora.errors import UserError
from pf2lora.federation.flare import admin
from pf2lora.federation.protocol.run_status import (
    CONTINUES,
    mean_loss,
)
from pf2lora.federation.protocol.signed_plan import SignedPlan


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
