"""Real processes, killed at any moment; full disks, folders that cannot be written, signals."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from broken_runs import DISK, clocks_standing_still, contents, dying_at, in_child, same, unbroken
from little_world import World, command_line, flags, make_world
from safetensors.torch import load_file

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run import folder, snapshot, trial

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "steps": 2,
    "evaluate_every": 1,
    "validation_ratio": 0.2,
    "checkpoint_every": 1,
}
METHODS = ["homlora", "pf2lora"]
HELPER = Path(__file__).parents[1] / "helpers" / "broken_runs.py"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, bytes]:
    """The files of an unbroken run in `world.root / "run"`."""
    with clocks_standing_still():
        return unbroken(world.root / "run", world.settings(**SETTINGS, method=METHODS))


@pytest.fixture
def out(world: World, expected: dict[str, bytes]) -> Iterator[Path]:
    """Where the unbroken run was: the config, which names its folder, must be the same."""
    with clocks_standing_still():
        yield world.root / "run"
    if (world.root / "run").exists():
        shutil.rmtree(world.root / "run")


def run(world: World, out: Path) -> None:
    pf2lora.federate(**world.settings(**SETTINGS, method=METHODS), out=out, resume=True)


@pytest.fixture(scope="module")
def disk_calls(world: World, expected: dict[str, bytes]) -> int:
    """How often a whole run does something to the disk."""
    with clocks_standing_still(), dying_at(0) as count:
        run(world, world.root / "run")
    shutil.rmtree(world.root / "run")
    return count[0]


def die_and_go_on(world: World, out: Path, calls: list[int]) -> None:
    """SIGKILL before the n-th thing done to the disk, again and again; then the rest."""
    for call in calls:
        can_be_read(out)

        def work(call: int = call) -> None:
            with dying_at(call):
                run(world, out)

        assert in_child(work) in (-signal.SIGKILL, 0)
    assert in_child(lambda: run(world, out)) == 0


def can_be_read(out: Path) -> None:
    """JSON and safetensors that are in a run folder are whole."""
    for file in out.rglob("*.json"):
        if snapshot.ASIDE not in file.parts:
            json.loads(file.read_text())
    for file in out.rglob("*.safetensors"):
        if snapshot.ASIDE not in file.parts:
            load_file(file)


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_between_two_writes(
    seed: int, world: World, disk_calls: int, out: Path, expected: dict[str, bytes]
) -> None:
    """In a save, between two of its files, at its rename, while an old one goes, while adapters are written."""
    assert disk_calls > 100
    chosen = random.Random(seed).sample(range(2, disk_calls), 3)
    die_and_go_on(world, out, chosen)
    same(contents(out), expected)


@pytest.mark.slow
def test_killed_at_every_write_of_two_saves(
    world: World, disk_calls: int, out: Path, expected: dict[str, bytes]
) -> None:
    last = range(disk_calls - 14, disk_calls + 1)
    for call in sorted({*range(2, disk_calls, max(1, disk_calls // 60)), *last}):
        shutil.rmtree(out, ignore_errors=True)
        die_and_go_on(world, out, [call])
        same(contents(out), expected)


def command(world: World, out: Path) -> list[str]:
    """A real `pf2lora compare … --resume`, with clocks that stand still."""
    settings = flags({**world.settings(**SETTINGS)} | {"out": out})
    at = settings.index("--clients")
    settings[at + 1 : at + 2] = [str(path) for path in world.clients]
    return [sys.executable, str(HELPER), "compare", *settings, "--method", *METHODS, "--resume"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_a_real_run_killed_at_a_random_moment(
    seed: int, world: World, out: Path, expected: dict[str, bytes]
) -> None:
    """SIGKILL from outside, three times: loading, in a step, in a measurement, in a save."""
    chance = random.Random(seed)
    for _ in range(3):
        process = subprocess.Popen(
            command(world, out), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(out / "config.toml", process)
        time.sleep(chance.uniform(0, 2.5))
        process.kill()
        assert process.wait() in (-signal.SIGKILL, 0)
    done = subprocess.run(command(world, out), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same(contents(out), expected)


def wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while not file.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)


def test_a_real_run_is_killed_and_goes_on(
    world: World, out: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    words = command(world, out)  # which goes on, given again: here, where everything is imported already
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(out / "checkpoints" / "000002", process)
    process.kill()
    process.wait()
    code, said, err = command_line(monkeypatch, capfd, *words[2:])
    assert code == 0 and "going on after round" in " ".join((said + err).split()), err
    same(contents(out), expected)


# --- signals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_round_and_says_how_to_go_on(
    number: signal.Signals,
    code: int,
    world: World,
    out: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    """Without a checkpoint due, the interrupted round is kept; the very command that is printed goes on."""
    args = [*command(world, out)[2:-1], "--checkpoint-every", "0"]
    with signalled(number, at=2):
        found, _, err = command_line(monkeypatch, capfd, *args)
    assert found == code
    assert "stopping at the end of this round; once more stops at once" in err
    again = err.strip().splitlines()[-1]
    assert again == (
        f"pf2lora: HOMLoRA: stopped after round 2, which is kept; go on with: "
        f"pf2lora compare {out}/config.toml --resume"
    )
    kept = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert kept == ["000001"]
    words = again.partition("go on with: pf2lora ")[2].split()
    assert command_line(monkeypatch, capfd, *words)[0] == 0
    written = contents(out)
    for name in ("config.toml", "result.json", "report.html"):  # they have the setting, which is 0
        written[name] = written[name].replace(b"checkpoint_every = 0", b"checkpoint_every = 1")
        written[name] = written[name].replace(b'"checkpoint_every": 0', b'"checkpoint_every": 1')
    written.pop("report.html")
    same(written, {name: data for name, data in expected.items() if name != "report.html"})


@contextmanager
def signalled(number: int, at: int, times: int = 1) -> Iterator[None]:
    """The process gets a signal in its n-th round, while that is written down."""
    original, count = folder.append_metrics, 0

    def noted(*args: Any) -> None:
        nonlocal count
        original(*args)
        count += 1
        if count == at:
            for _ in range(times):
                os.kill(os.getpid(), number)

    with patch.object(folder, "append_metrics", noted):
        yield


def test_a_second_signal_stops_at_once(
    world: World, out: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with signalled(signal.SIGINT, at=3, times=2):
        code, _, err = command_line(monkeypatch, capfd, *command(world, out)[2:-1])
    assert code == 130 and "stopped at once; go on with: pf2lora compare" in err
    assert command_line(monkeypatch, capfd, *command(world, out)[2:])[0] == 0
    same(contents(out), expected)


def test_ctrl_c_before_the_training_says_so(
    world: World, out: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def interrupted(*what: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pf2lora.run.api.prepare", interrupted)
    code, _, err = command_line(monkeypatch, capfd, *command(world, out)[2:])
    assert (code, err) == (130, "pf2lora: stopped before the training began\n") and not out.exists()


def test_signals_are_as_before_when_a_run_has_ended(world: World, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    pf2lora.federate(**world.settings(rounds=1, out=tmp_path / "run"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- disks --------------------------------------------------------------------------------------------------


@contextmanager
def failing_at(call: int, number: int = errno.ENOSPC) -> Iterator[list[int]]:
    """The n-th thing done to the disk fails, and all after it."""
    count = [0]
    with dying_at(0):
        originals = {name: getattr(os, name) for name in DISK}

    def counting(name: str) -> Any:
        def counted(*args: Any, **rest: Any) -> Any:
            count[0] += 1
            if count[0] >= call and name != "unlink":
                raise OSError(number, os.strerror(number), str(args[0]))
            return originals[name](*args, **rest)

        return counted

    with patch.multiple(os, **{name: counting(name) for name in DISK}):
        yield count


@pytest.mark.parametrize("part", range(1, 10))
def test_a_disk_that_fills_up_leaves_a_run_that_goes_on(
    part: int, world: World, disk_calls: int, out: Path, expected: dict[str, bytes]
) -> None:
    """Whichever write is the first to fail: one line with the command, and the last checkpoint is whole."""
    with failing_at(disk_calls * part // 10), pytest.raises(UserError) as error:
        run(world, out)
    line = str(error.value)
    assert "\n" not in line and "No space left on device" in line, line
    assert "go on with: pf2lora compare" in line or not (out / "config.toml").exists(), line
    run(world, out)
    same(contents(out), expected)


def test_a_small_file_system(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A real one, where the test may mount it."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        args = command(world, small / "run")[2:]
        code, _, err = command_line(monkeypatch, capfd, *args)
        assert code == 2 and err.count("\n") == 1 and "No space left on device" in err, err
        assert "go on with: pf2lora compare" in err
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        assert command_line(monkeypatch, capfd, *args)[0] == 0
        assert not (small / "run" / "checkpoints").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cannot_be_written(world: World, out: Path, expected: dict[str, bytes]) -> None:
    """A run that is broken off by it goes on when it can be written again."""
    with failing_at(40, errno.EROFS), pytest.raises(UserError, match="Read-only file system") as error:
        run(world, out)
    assert "\n" not in str(error.value)
    run(world, out)
    same(contents(out), expected)


def test_no_memory_is_one_line_that_says_how_to_go_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given less at a time, the run goes on."""
    settings = world.settings(**SETTINGS, out=tmp_path / "run")

    def fails_with(error: BaseException) -> Exception:
        def refused(*args: Any) -> None:
            raise error

        monkeypatch.setattr(trial, "finish", refused)
        with pytest.raises((UserError, RuntimeError)) as found:
            pf2lora.federate(**settings, resume=True)
        return found.value

    for error, words in (
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "CUDA out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"), "not enough memory"),
        (MemoryError(), "no memory"),
    ):
        line = str(fails_with(error))
        assert words in line and "--clients-per-pass needs less; go on with: pf2lora train" in line
    assert str(fails_with(RuntimeError("a bug"))) == "a bug"
    monkeypatch.undo()
    result = pf2lora.federate(**settings, clients_per_pass=1, resume=True)
    assert [r.round for r in result.methods["pf2lora"].runs[0].rounds] == [1, 2, 3]
