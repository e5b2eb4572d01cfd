"""A real `torchrun -m pf2lora train`: on a CPU, killed and resumed; on an accelerator, where there is one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, command_line, flags, make_world

from pf2lora.run.result import Result, load_result


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def command(processes: int, *args: str) -> list[str]:
    """As `torchrun --nproc-per-node N -m pf2lora ARGS…`, or without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes else []
    return [sys.executable, *launcher, "-m", "pf2lora", *args]


def words(world: World, out: Path, device: str, **changes: object) -> list[str]:
    files = [str(path) for path in world.clients]
    settings = {"rank": 4, "batch_size": 8, "rounds": 3, "steps": 2, "evaluate_every": 1, "device": device}
    rest = flags(settings | changes | {"out": str(out)})
    return ["train", "--model", str(world.model), "--clients", *files, *rest, "--method", "pf2lora"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(words: list[str]) -> None:
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def assert_same(found: Result, expected: Result, tolerance: float) -> None:
    pairs = zip(
        found.methods["pf2lora"].runs[0].rounds, expected.methods["pf2lora"].runs[0].rounds, strict=True
    )
    for one, other in pairs:
        assert one.train_loss == pytest.approx(other.train_loss, abs=tolerance)
        assert one.validation_loss == pytest.approx(other.validation_loss, abs=tolerance)


def test_two_processes_are_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the real launcher, on a CPU: the numbers of this process alone."""
    changes = {"rounds": 1, "personal_steps": 0, "lr": 1e-3}
    run(command(2, *words(world, tmp_path / "two", "cpu", **changes)))
    code, _, err = command_line(monkeypatch, capsys, *words(world, tmp_path / "one", "cpu", **changes))
    assert code == 0, err
    two, one = load_result(tmp_path / "two"), load_result(tmp_path / "one")
    assert two.machine["processes"] == 2
    assert_same(two, one, 1e-5)


def test_of_two_machines_one_process_writes_and_speaks(world: World, tmp_path: Path) -> None:
    """Two launchers, each in a folder of its own, as on machines that share nothing but the clients' files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    args = words(world, Path("run"), "cpu", rounds=1, steps=1, personal_steps=0, lr=1e-3)
    nodes = []
    for number in range(2):
        there = [
            "--nnodes",
            "2",
            "--node-rank",
            str(number),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
        ]
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *there,
            "--nproc-per-node",
            "1",
            "-m",
            "pf2lora",
        ]
        folder = tmp_path / str(number)
        folder.mkdir()
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen([*start, *args], cwd=folder, env=environment(), **pipes))
    said = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "Use it:" in said[0][0] and said[1] == ("", "")
    assert load_result(tmp_path / "0" / "run").machine["processes"] == 2
    assert not list((tmp_path / "1").iterdir())


@pytest.mark.slow
def test_a_killed_process_and_another_number_of_them(world: World, tmp_path: Path) -> None:
    """One of four is killed; the line that is printed says what is kept, and one goes on with all clients."""
    changes = {"rounds": 150, "evaluate_every": 150, "checkpoint_every": 1, "personal_steps": 0}
    args = words(world, tmp_path / "run", "cpu", **changes)
    with subprocess.Popen(
        command(4, *args), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        until = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "000002").exists() and time.monotonic() < until:
            time.sleep(0.05)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    (line,) = (line for line in err.splitlines() if line.startswith("pf2lora: "))
    assert "another process of the run has ended" in line and " is kept; go on with: torchrun" in line
    run(command(0, *args, "--resume"))
    assert len(load_result(tmp_path / "run").methods["pf2lora"].runs) == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_on_accelerators_are_one(world: World, tmp_path: Path) -> None:
    """Each has its own (NCCL) where there are two; else both share one, and tensors travel through the host."""
    changes = {"precision": "float32", "lr": 1e-3}
    run(command(2, *words(world, tmp_path / "two", "cuda", **changes)))
    run(command(0, *words(world, tmp_path / "one", "cuda", **changes)))
    two, one = load_result(tmp_path / "two"), load_result(tmp_path / "one")
    assert two.machine["processes"] == 2 and two.machine["device"] == one.machine["device"] == "cuda"
    assert_same(two, one, 5e-3)
