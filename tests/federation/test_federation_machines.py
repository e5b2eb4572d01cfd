"""The guide's steps on separate machines: network namespaces with addresses of their own, one behind a slow link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_federation import local_run, write_data, write_model, write_site_file

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")


from pf2lora.federation.protocol import run_status
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.server import ServerSession

MACHINES = {"server": "10.77.0.1", "clinic-a": "10.77.0.2", "clinic-b": "10.77.0.3", "lead": "10.77.0.4"}
SWITCH = "pf2lora-switch"
CLI = [sys.executable, "-c", "from pf2lora.cli.federation import app; app()"]


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def namespace(name: str) -> str:
    return f"pf2lora-{name}"


@pytest.fixture
def machines() -> Iterator[None]:
    """Four machines on one switch; clinic-b sends at 256 kbit/s."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    try:
        shell(f"ip netns add {SWITCH}")
        shell(f"ip netns exec {SWITCH} ip link add bridge type bridge")
        shell(f"ip netns exec {SWITCH} ip link set bridge up")
        for k, (name, address) in enumerate(MACHINES.items()):
            there = namespace(name)
            shell(f"ip netns add {there}")
            shell(f"ip link add pfe{k} type veth peer name pfp{k}")
            shell(f"ip link set pfe{k} netns {there}")
            shell(f"ip link set pfp{k} netns {SWITCH}")
            shell(f"ip netns exec {there} ip addr add {address}/24 dev pfe{k}")
            shell(f"ip netns exec {there} ip link set pfe{k} up")
            shell(f"ip netns exec {there} ip link set lo up")
            shell(f"ip netns exec {SWITCH} ip link set pfp{k} master bridge")
            shell(f"ip netns exec {SWITCH} ip link set pfp{k} up")
        slow = "root tbf rate 256kbit burst 16kbit latency 2s"
        shell(f"ip netns exec {namespace('clinic-b')} tc qdisc add dev pfe2 {slow}")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel cannot: {error.stderr.decode().strip()}")
    finally:
        for name in [*map(namespace, MACHINES), SWITCH]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def on(machine: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace(machine), *command]


def ask(machine: str, *args: str) -> str:
    done = subprocess.run(on(machine, *CLI, *args), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


SITES_THERE = ("clinic-a", "clinic-b")


def make_kits(root: Path) -> Path:
    """A federation's kits, made by the lead on its machine."""
    write_model(root / "model")
    write_data(root, SITES_THERE)
    project = root / "project.toml"
    project.write_text(f'name = "clinics"\nhost = "{MACHINES["server"]}"\nsites = ["clinic-a", "clinic-b"]\n')
    ask("lead", "provision", str(project), "--out", str(root / "kits"))
    for site in SITES_THERE:
        write_site_file(root / "kits" / site / "local" / "site.toml", root, site)
    return root / "kits"


@contextmanager
def joined(root: Path, kits: Path) -> Iterator[None]:
    """Everybody runs `join` on a machine of its own."""
    started = []
    try:
        for name in ("server", *SITES_THERE):
            log = (root / f"{name}.log").open("wb")
            command, own = on(name, *CLI, "join", str(kits / name)), os.environ | {"OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own))
        there = kits / "server" / run_status.SITES
        wait(lambda: all((there / s).exists() for s in SITES_THERE), 120, "the sites")
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=60)


@pytest.mark.slow
def test_a_cut_link_costs_half_a_minute_at_most(tmp_path: Path, machines: None) -> None:
    """Nothing comes through for 30 s, and nobody is told so: the site's port is taken off the switch."""
    kits = make_kits(tmp_path)
    lead = ["--kit", str(kits / "lead@pf2lora.local")]
    with joined(tmp_path, kits):
        flags = [
            "--rounds=900",
            "--steps=30",
            "--batch-size=4",
            "--rank=4",
            "--deadline=10",
            "--method=homlora",
        ]
        ask("lead", "submit", *lead, "--sites", "clinic-a,clinic-b", "--labels", "neg,pos", *flags)
        folder = run_status.run_folder(kits / "server", "run")
        wait(lambda: (s := run_status.read_status(folder)) and s.round >= 2, 180, "two rounds")
        cut = time.monotonic()
        shell(f"ip netns exec {SWITCH} ip link set pfp1 nomaster")
        wait(lambda: says(folder, "clinic-a did not answer round"), 60, "the deadline")
        time.sleep(max(0.0, 30 - (time.monotonic() - cut)))
        shell(f"ip netns exec {SWITCH} ip link set pfp1 master bridge")
        began = time.monotonic()
        wait(lambda: says(folder, "clinic-a is back"), 120, "its return")
        took = time.monotonic() - began
        print(f"cut for {began - cut:.1f} s, back after {took:.1f} s")
        assert took < 30

        def answered_again() -> bool:
            session = ServerSession(Plan.from_json((folder / "plan.json").read_text()), folder)
            return "clinic-a" in list(session.records)[-1]["answered"]

        wait(answered_again, 60, "its update")


def says(folder: Path, words: str) -> bool:
    return any(words in line for line in run_status.read_lines(folder))


@pytest.mark.slow
def test_the_guide_on_separate_machines(tmp_path: Path, machines: None) -> None:
    kits, sites = make_kits(tmp_path), SITES_THERE
    with joined(tmp_path, kits):
        values = {
            "rounds": 4,
            "steps": 2,
            "batch-size": 4,
            "rank": 4,
            "lr": 0.01,
            "client-lr": 0.05,
            "deadline": 60,
        }
        flags = [f"--{name}={value}" for name, value in values.items()]
        lead = ["--kit", str(kits / "lead@pf2lora.local")]
        said = ask("lead", "submit", *lead, "--sites", "clinic-a,clinic-b", "--labels", "neg,pos", *flags)
        assert "deadline 60 s a round, quorum 0.5" in said
        folder = run_status.run_folder(kits / "server", "run")
        wait(lambda: (s := run_status.read_status(folder)) and s.state == "finished", 200, "the end")
        assert "run" in ask("lead", "status", *lead)
        plan = Plan.from_json((folder / "plan.json").read_text())
        found = ServerSession(plan, folder)
        assert [r["answered"] for r in found.records] == [list(sites)] * 4
        _, common, _ = local_run(tmp_path, plan)
        assert found.common is not None
        assert (found.common - common).abs().max() <= 1e-5
        print("seconds per round:", [round(r["seconds"], 2) for r in found.records])
        # A long run, stopped by the lead.
        ask(
            "lead",
            "submit",
            *lead,
            "--name",
            "long",
            "--sites",
            "clinic-a,clinic-b",
            "--labels",
            "neg,pos",
            "--rounds",
            "1000",
        )
        folder = run_status.run_folder(kits / "server", "long")
        wait(lambda: (s := run_status.read_status(folder)) and s.round >= 2, 120, "two rounds")
        assert "of 1000" in ask("lead", "status", *lead)
        assert "is stopped" in ask("lead", "stop", "long", *lead)
        wait(lambda: (s := run_status.read_status(folder)) and s.state == "stopped", 60, "the stop")


def wait(condition: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.2)
