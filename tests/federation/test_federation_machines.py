"""The guide's steps on separate machines: network namespaces with addresses of their own, one behind a slow link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


@pytest.mark.slow
def test_the_guide_on_separate_machines(tmp_path: Path, machines: None) -> None:
    sites = ("clinic-a", "clinic-b")
    write_model(tmp_path / "model")
    write_data(tmp_path, sites)
    project = tmp_path / "project.toml"
    project.write_text(f'name = "clinics"\nhost = "{MACHINES["server"]}"\nsites = ["clinic-a", "clinic-b"]\n')
    kits = tmp_path / "kits"
    ask("lead", "provision", str(project), "--out", str(kits))
    for site in sites:
        write_site_file(kits / site / "local" / "site.toml", tmp_path, site)
    started = []
    try:
        for name in ("server", *sites):
            log = (tmp_path / f"{name}.log").open("wb")
            command = on(name, *CLI, "join", str(kits / name))
            started.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
                )
            )
        wait(lambda: all((kits / "server" / run_status.SITES / s).exists() for s in sites), 120, "the sites")
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
            "5000",
        )
        folder = run_status.run_folder(kits / "server", "long")
        wait(lambda: (s := run_status.read_status(folder)) and s.round >= 2, 120, "two rounds")
        assert "of 5000" in ask("lead", "status", *lead)
        assert "is stopped" in ask("lead", "stop", "long", *lead)
        wait(lambda: (s := run_status.read_status(folder)) and s.state == "stopped", 60, "the stop")
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=60)


def wait(condition: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.2)
