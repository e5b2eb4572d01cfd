"""Sites that come back, with real processes: at once, after the end, after a cut link; and a killed `join`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from figures import figures, private_words
from small_federation import SITES, make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

import psutil
from flare_federation import flare

from pf2lora.federation.protocol.metrics import Participant, exposition
from pf2lora.federation.protocol.server import ServerSession

pytestmark = pytest.mark.slow


def test_a_site_that_is_started_again_is_noticed_at_once_and_one_away_at_the_end_is_served(
    tmp_path: Path,
) -> None:
    plan = make_plan("pf2lora", SITES[:3], config={"rounds": 25, "steps": 30}, deadline=60)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.round() >= 2, 120, "round 2")
        run.kill("site-2")
        run.start("site-2")
        run.wait(lambda: run.says("before it was started again"), 60, "it to be noticed")
        run.wait(lambda: run.says("rounds 4 to") or run.says("rounds 5 to"), 120, "the run to go on with it")
        assert all(
            r["seconds"] < 30 for r in ServerSession(plan, run.run).records
        )  # nobody waited for the deadline
        at = run.round()
        run.wait(lambda: run.round() > at, 120, "a round of the new job")
        run.kill("site-3")  # it is not there at the end
        run.wait(lambda: run.state() == "finished", 240, "the end")
        final = run.run / "final.json"
        assert "site-3" not in json.loads(final.read_text())
        run.start("site-3")
        run.wait(lambda: "site-3" in json.loads(final.read_text()), 120, "the last x")
        assert (tmp_path / "state" / "site-3" / plan.name / "clients" / "site-3").is_dir()
        run.wait(lambda: run.state() == "finished", 60, "the end")


@pytest.mark.parametrize("seconds", [40, 80])
def test_a_stopped_site_is_back_within_half_a_minute(tmp_path: Path, seconds: int) -> None:
    """SIGSTOP is what a cut link is to the others: nothing comes, and nothing says so. After a minute without a
    heartbeat FLARE takes a site for dead."""
    plan = make_plan("homlora", SITES[:2], config={"rounds": 400, "steps": 30}, deadline=10)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.round() >= 2, 120, "round 2")
        site = psutil.Process(run.started["site-2"].pid)
        family = [site, *site.children(recursive=True)]
        stopped = time.monotonic()
        for member in family:
            member.send_signal(signal.SIGSTOP)
        run.wait(lambda: run.says("site-2 did not answer round"), 60, "the deadline")
        time.sleep(max(0.0, seconds - (time.monotonic() - stopped)))
        for member in family:
            member.send_signal(signal.SIGCONT)
        began = time.monotonic()
        run.wait(lambda: run.says("site-2 is back"), 60, "its return")
        print(f"stopped for {began - stopped:.1f} s, back after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 30

        def answers() -> bool:
            last = ServerSession(plan, run.run).records.last
            return last is not None and "site-2" in last["answered"]

        run.wait(answers, 90, "its update")
        print(f"its update after {time.monotonic() - began:.1f} s")


def test_a_killed_join_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = make_plan("homlora", SITES[:1], config={"rounds": 400, "steps": 30}, deadline=60)
    with flare(tmp_path, plan) as run:
        run.start("server")
        start = [sys.executable, "-c", "from pf2lora.cli.federation import app; app()", "join"]
        watched = ["--log", "json", "--metrics", str(tmp_path / "site.prom")]
        with (tmp_path / "events").open("wb") as events:
            join = subprocess.Popen(
                [*start, str(run.kits["site-1"]), *watched], stdout=events, stderr=subprocess.DEVNULL
            )
        run.wait(lambda: (run.kits["server"] / "registered" / "site-1").exists(), 90, "the site")
        run.submit()
        run.wait(lambda: run.round() >= 2, 120, "round 2")
        run.wait(lambda: '"round": 2,' in (tmp_path / "events").read_text(), 30, "an event of round 2")
        said = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
        assert [event["event"] for event in said[:2]] == ["joined", "run_state"]
        assert all(event["loss"] > 0 for event in said if event["event"] == "round_ended")
        run.wait(lambda: "pf2lora_round_seconds" in (tmp_path / "site.prom").read_text(), 40, "figures")
        site = Participant(run.kits["site-1"], "site-1", False, 0.0)
        for who in (site, Participant(run.kits["server"], "server", True, 0.0)):
            assert figures(exposition(who))['pf2lora_received_bytes_total{run="trial"}'] > 1000
            assert not private_words(exposition(who))
        assert not private_words((tmp_path / "events").read_text())
        family = psutil.Process(join.pid).children(recursive=True)
        assert len(family) == 2  # the site and its job
        os.kill(join.pid, signal.SIGKILL)
        join.wait()
        _, alive = psutil.wait_procs(family, timeout=15)
        assert not alive
