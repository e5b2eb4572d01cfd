"""Random kills, with real processes: sites, the server, their jobs and all of them; nothing of the run is lost."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_federation import SITES, make_plan, make_small

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

import psutil
from flare_federation import Flare, flare

from pf2lora.federation.protocol.server import ServerSession

pytestmark = pytest.mark.slow
SEED, FAULTS, ROUNDS = 14, 6, 30


def killed_site(run: Flare, draw: random.Random) -> None:
    site = draw.choice(run.plan.sites)
    run.kill(site)
    time.sleep(draw.uniform(0, 3))
    run.start(site)


def killed_server(run: Flare, draw: random.Random) -> None:
    run.kill("server")
    time.sleep(draw.uniform(0, 3))
    run.start("server")


def killed_everything(run: Flare, draw: random.Random) -> None:
    for name in draw.sample(list(run.started), len(run.started)):
        run.kill(name)
    run.start("server")
    run.start(*run.plan.sites)


def killed_job(run: Flare, draw: random.Random) -> None:
    run.kill_job(draw.choice(["server", *run.plan.sites]))


def silent_site(run: Flare, draw: random.Random) -> None:
    """Nothing comes, and nothing says so: what a cut link is to the others."""
    site = psutil.Process(run.started[draw.choice(run.plan.sites)].pid)
    family = [site, *site.children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(5, 15))
    for member in family:
        member.send_signal(signal.SIGCONT)


HARM: list[Callable[[Flare, random.Random], None]] = [
    killed_site,
    killed_server,
    killed_everything,
    killed_job,
    silent_site,
]


def test_random_kills_lose_no_round_and_change_no_number(tmp_path: Path) -> None:
    """With a quorum of all sites, every round is everybody's: x is that of the undisturbed run, to the last bit."""
    draw = random.Random(SEED)
    config = {"rounds": ROUNDS, "steps": 20}
    plan = make_plan("pf2lora", SITES[:3], wire="bfloat16", config=config, quorum=1.0, deadline=30, wait=300)
    faults = [*draw.sample(HARM, len(HARM)), *draw.choices(HARM, k=FAULTS - len(HARM))]
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        for harm in faults:
            at = run.round()
            run.wait(lambda at=at: run.round() >= at + 2, 240, f"two rounds before {harm.__name__}")  # type: ignore[misc]
            time.sleep(draw.uniform(0, 1))
            if run.state() == "finished":
                break
            print(f"after round {run.round()}: {harm.__name__}", flush=True)
            harm(run, draw)
        run.wait(lambda: run.state() == "finished", 600, "the end")
        records = ServerSession(plan, run.run).records
        found = ServerSession(plan, run.run).common
    assert [r["round"] for r in records] == list(range(1, ROUNDS + 1))
    assert all(r["answered"] == list(plan.sites) for r in records)
    undisturbed = make_small(tmp_path / "undisturbed", plan)
    undisturbed.run()
    assert found is not None and undisturbed.coordinator.common is not None
    assert torch.equal(found, undisturbed.coordinator.common)
