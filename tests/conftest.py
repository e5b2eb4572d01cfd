"""Fixtures that several test modules share."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from little_world import World
    from small_federation import Small

    from pf2lora.core.choice import Judge
    from pf2lora.core.method import State
    from pf2lora.methods.own_size import OwnSize
    from pf2lora.run.deploy import Deployment

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never reach for a hub


def pytest_collection_finish() -> None:
    """What is imported stays: a run looks through all objects for garbage before each method, which in a process with
    every test module took as long as a tiny run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def disk_that_does_not_wait() -> Iterator[None]:
    """No test cuts the power: what is written is not waited for, of which a tiny run does as much as it computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # a descriptor must be one
        yield


@pytest.fixture
def sized_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """`client_lr = "auto"` before every round: tiny runs are too short for a size to be tried otherwise."""
    from pf2lora.methods import own_size

    monkeypatch.setattr(own_size, "ASKED", Fraction(1, 1000))


@pytest.fixture
def resized(sized_every_round: None, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Beside that: for each time that sizes were tried between rounds, whether a client got another."""
    from pf2lora.methods.own_size import OwnSize

    original, seen = OwnSize.resize, list[bool]()

    def watched(self: OwnSize, s: State, judge: Judge, *, serving: bool = False) -> State:
        found = original(self, s, judge, serving=serving)
        if not serving:
            seen.append(bool((found.y != s.y).any()))
        return found

    monkeypatch.setattr(OwnSize, "resize", watched)
    return seen


SHARED = Path(os.environ.get("PF2LORA_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no data folder at {SHARED} (set PF2LORA_SHARED_DATA)")
    return SHARED


@pytest.fixture
def stand_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs without CUDA."""
    from stand_in_graphs import install

    install(monkeypatch)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors as small as a test's only wait for a second thread, above all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' written-out attention takes its softmax in float32, whatever the model's precision is."""
    import torch

    original = torch.nn.functional.softmax

    def softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return original(scores, dim, dtype=None if scores.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """A federation in one process whose sites have said hello."""
    from small_federation import make_plan, make_small

    made = make_small(tmp_path, make_plan("pf2lora"))
    made.greet()
    return made


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with a comparison that was broken off in the second method's fourth round, and its unbroken twin."""
    from broken_runs import COMPARISON, Killed, clocks_standing_still, killed_at
    from little_world import make_world

    import pf2lora

    world = make_world(tmp_path_factory.mktemp("world"))
    with clocks_standing_still():
        pf2lora.federate(**world.settings(**COMPARISON, out=world.root / "run"))
        (world.root / "run").rename(world.root / "unbroken")
        with pytest.raises(Killed), killed_at(8):
            pf2lora.federate(**world.settings(**COMPARISON, out=world.root / "run"))
    return world


@pytest.fixture
def broken(begun: World, tmp_path: Path) -> Iterator[Path]:
    """The broken-off run, as it was, at its own place: what a test does to it is undone."""
    from broken_runs import clocks_standing_still

    out = begun.root / "run"
    shutil.copytree(out, tmp_path / "kept")
    with clocks_standing_still():
        yield out
    shutil.rmtree(out)
    shutil.copytree(tmp_path / "kept", out)


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """METEOR starts Java, which takes longer than a tiny run; tests of the scores themselves have it."""
    monkeypatch.setenv("PATH", "")


@pytest.fixture(scope="session")
def generation_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a tiny language model; not to be changed."""
    from serving import write_generation_run

    return write_generation_run(tmp_path_factory.mktemp("generation"))


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Deployment]:
    """Deployments by hand (`deployments.py`)."""
    from deployments import deployments

    return deployments(monkeypatch)
