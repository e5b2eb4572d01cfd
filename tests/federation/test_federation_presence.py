"""Who takes part, by the controller called directly: sites that start again and again, that are refused, removed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_federation import SITES, make_plan, make_small

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.signal import Signal
from site_executor import controller_of

from pf2lora.federation.flare import controller, presence
from pf2lora.federation.flare.controller import FederationController
from pf2lora.federation.flare.presence import FREE, NewJob
from pf2lora.federation.flare.resumer import note
from pf2lora.federation.protocol.messages import encode
from pf2lora.federation.protocol.pauses import LONGEST, Pauses
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.removals import REMOVED
from pf2lora.federation.protocol.run_status import ALIVE, ENDED, read_lines, read_status
from pf2lora.federation.protocol.run_status import SITES as REGISTERED
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.stopping import QuorumMissed

pytestmark = pytest.mark.usefixtures("one_thread")


class Run:
    """A run whose jobs are controllers in this process, one after the other, on sites of this process."""

    def __init__(self, root: Path, plan: Plan) -> None:
        self.small = make_small(root, plan)
        self.folder, self.plan, self.jobs, self.asked = root / "run", plan, 0, list[str]()
        self.timeouts: dict[str, float] = {}

    def job(self, *there: str) -> FederationController:
        """The next job, with these sites in it."""
        made, self.jobs = controller_of(self.plan, self.folder), self.jobs + 1
        made.status.job, made.abort = f"job-{self.jobs}", Signal()
        made.session = ServerSession(self.plan, self.folder)
        made.remember(read_status(self.folder))
        engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=site) for site in there])
        made.fl_ctx = SimpleNamespace(get_engine=lambda: engine)
        made.get_client_disconnect_time = lambda site: None
        made.hand_out = lambda: None  # type: ignore[method-assign]

        def exchange(name: str, requests: Mapping[str, bytes], timeout: float, take: Any = None) -> Any:
            self.timeouts[name] = timeout
            return self.small.ask(dict(requests))

        def post(name: str, site: str, data: bytes, seconds: int, deliver: Any) -> Any:
            self.asked.append(site)

        made.exchange, made.post = exchange, post  # type: ignore[method-assign]
        made.collect_hellos()
        return made

    def starts(self, site: str) -> None:
        """The site is started again, later than any job."""
        note(self.folder / REGISTERED, site)
        os.utime(self.folder / REGISTERED / site, (time.time() + 9, time.time() + 9))


def one_round(job: FederationController) -> None:
    """What the controller does before its next round, and that round."""
    job.take_back()
    answers = job.exchange("round", job.session.requests(job.present, set()), 1.0)
    record = job.session.finish_round(answers, 0.1, [])
    job.answered(record["answered"])
    job.report(record)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, make_plan("homlora", config={"rounds": 30}))


def test_a_site_that_crashes_again_and_again_does_not_keep_the_others_from_their_rounds(run: Run) -> None:
    others = [site for site in SITES if site != "site-2"]
    for _ in range(FREE + 1):  # each time it registers, and is gone again before it answers
        job = run.job(*others)
        run.starts("site-2")
        with pytest.raises(NewJob):
            job.take_back()
        job.note("continue")
    for number in range(1, 4):
        job = run.job(*others)
        run.starts("site-2")
        one_round(job)  # no new job: the others have their round
        assert job.session.done == number
        assert "started again 4 times and answered nothing" in job.status.left_out["site-2"]
    status = read_status(run.folder)
    assert (
        status is not None and "UTC or later" in status.left_out["site-2"] and status.returns == {"site-2": 3}
    )
    said = [line for line in read_lines(run.folder) if line.startswith("site-2 is left out")]
    assert len(said) == 3  # once in each job
    job.came_back.until["site-2"] = time.time() - 1
    with pytest.raises(NewJob):  # its pause is over
        job.take_back()
    assert job.came_back.until["site-2"] - time.time() > 1.9 * presence.PAUSE  # the next is longer
    job.note("continue")
    job = run.job(*SITES)
    job.started = time.time() + 99
    one_round(job)
    assert job.status.returns == job.status.paused == {}  # it answered: all is forgotten


def test_pauses_grow_and_end() -> None:
    now = [100.0]
    pauses = Pauses(free=1, clock=lambda: now[0])
    assert [pauses.add("a", 10.0) for _ in range(4)] == [0.0, 10.0, 20.0, 40.0]
    assert not pauses.over("a") and pauses.over("b")
    now[0] = 140.0
    assert pauses.over("a")
    assert max(pauses.add("a", 10.0) for _ in range(2000)) == LONGEST
    pauses.clear("a")
    assert pauses.over("a") and pauses.add("a", 10.0) == 0.0


def test_a_refused_site_is_asked_less_and_less_often(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = encode({"kind": "problem", "round": 1, "code": "disk-full"})
    run.small.tamper = lambda site, data: problem if site == "site-4" else data
    job = run.job(*SITES)
    assert "site-4" in job.status.left_out
    now = time.time()
    monkeypatch.setattr(job.asked_again, "clock", lambda: now)
    asked_at = []
    for second in range(100):  # what it would say at once, each time
        now = job.asked_again.until["site-4"] - presence.AGAIN if second == 0 else now + 1
        before = len(run.asked)
        job.take_back()
        if len(run.asked) > before:
            asked_at.append(second)
            job.returned["site-4"] = problem
    assert asked_at == [5, 16, 37, 78]  # after 5, 10, 20 and 40 seconds
    assert len([line for line in read_lines(run.folder) if "site-4 is left out" in line]) == 1


def test_a_removed_site_is_dropped_from_a_run_that_goes_on(run: Run) -> None:
    job = run.job(*SITES)
    one_round(job)
    assert job.present == list(SITES)
    (run.folder / REMOVED).write_text(json.dumps({"disabled_clients": ["site-3"]}))
    assert job.lost("site-3") and not job.lost("site-1")
    run.starts("site-3")  # it begins no new job either
    one_round(job)
    assert job.session.records.last is not None
    assert job.session.records.last["answered"] == ["site-1", "site-2", "site-4"]
    assert job.status.left_out == {"site-3": "it was removed from the federation"}


def test_a_round_below_its_quorum_is_tried_for_as_long_as_the_lead_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, tries, now = run.job(*SITES), 0, 1000.0
    monkeypatch.setattr(controller.time, "monotonic", lambda: now)

    def part() -> None:  # the sites are there, and nobody answers
        nonlocal tries, now
        tries, now = tries + 1, now + 600
        raise QuorumMissed(1, 0, 4, run.plan, ["site-1"], {})

    with pytest.raises(QuorumMissed):
        job.patiently(part)
    assert run.plan.wait == 3600 and tries == 7
    waits = [line.rsplit("; ")[-1] for line in read_lines(run.folder) if "waits" in line]
    assert waits == [f"it waits for them up to {left} s" for left in range(3600, 0, -600)]


def test_a_site_that_registers_while_a_job_starts_is_taken_into_the_next(run: Run) -> None:
    """After FLARE chose the job's sites, and before the job's process had begun."""
    run.folder.mkdir()
    note(run.folder / REGISTERED, "site-2")
    os.utime(run.folder / REGISTERED / "site-2", (time.time() - 3, time.time() - 3))
    job = run.job(*(site for site in SITES if site != "site-2"))
    one_round(job)  # it is not heard of: perhaps it is gone
    note(run.folder / ALIVE, "site-2")
    with pytest.raises(NewJob):
        job.take_back()


def test_a_site_whose_part_of_the_job_failed_is_not_waited_for(run: Run) -> None:
    job = run.job(*SITES)
    assert not job.lost("site-2")
    (run.folder / ENDED).mkdir()
    (run.folder / ENDED / "site-2").write_text("job-0")  # of an earlier job
    assert not job.lost("site-2") and job.until("site-2", 600) == "within 600 s"
    (run.folder / ENDED / "site-2").write_text(job.status.job)
    assert job.until("site-2", 600) == "before its part of the job ended"
    assert job.lost("site-2") and not job.needs_new_job("site-2")
    note(run.folder / ALIVE, "site-2")
    assert job.needs_new_job("site-2") and not job.needs_new_job("site-1")


def test_the_last_scores_have_a_deadline_of_their_own(tmp_path: Path) -> None:
    run = Run(tmp_path, make_plan("homlora", deadline=7, final_deadline=11, config={"rounds": 2}))
    job = run.job(*SITES)
    job.run_rounds()
    assert job.status.state == "finished"
    assert (run.timeouts["round"], run.timeouts["finish"]) == (7, 11)
    assert run.timeouts["hello"] == presence.LOADING


def test_who_does_not_tell_its_last_scores_in_time_is_absent(tmp_path: Path) -> None:
    run = Run(tmp_path, make_plan("homlora", config={"rounds": 1}))
    job = run.job(*SITES)
    answered = job.exchange

    def slow(name: str, requests: Mapping[str, bytes], timeout: float, take: Any = None) -> Any:
        return {
            s: a for s, a in answered(name, requests, timeout).items() if (name, s) != ("finish", "site-2")
        }

    job.exchange = slow  # type: ignore[method-assign]
    job.run_rounds()
    assert job.status.absent == ["site-2"]
    assert "without the last x: site-2; it is fetched when the site is back" in read_lines(run.folder)
    (run.folder / REMOVED).write_text(json.dumps({"disabled_clients": ["site-2"]}))
    again = run.job(*SITES)
    again.run_rounds()
    assert again.status.absent == []  # nobody waits for one that was removed
