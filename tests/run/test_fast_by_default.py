"""What a user gets without a flag: the precision of the device, and compiled passes where a run is long enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, make_world

import pf2lora
from pf2lora.reproduce.presets import load_preset, preset_names
from pf2lora.run import compiling, trial
from pf2lora.run.comparison import Watcher, compare, prepare
from pf2lora.run.config import from_settings, to_dict
from pf2lora.run.model_settings import ModelSettings
from pf2lora.run.set_up import set_up
from pf2lora.run.workload import Workload


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def with_cuda(monkeypatch: pytest.MonkeyPatch, *, bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)


@pytest.mark.parametrize(
    ("device", "bf16", "found"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("cuda:1", True, "bfloat16"),
        ("cpu", True, "float32"),
    ],
)
def test_the_precision_is_the_devices(
    device: str, bf16: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cuda(monkeypatch, bf16=bf16)
    assert ModelSettings(device=device).precision == found
    assert ModelSettings(device=device, precision="float32").precision == "float32"


def test_a_run_says_which_precision_it_had(world: World, tmp_path: Path) -> None:
    result = pf2lora.federate(**world.settings(rounds=1, steps=1, out=tmp_path / "run"))
    assert result.config["model"]["precision"] == "float32"


def test_the_papers_runs_are_in_float32_wherever_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, bf16=True)
    configs = [run.config for name in preset_names() for run in load_preset(name).runs]
    assert {config.model.precision for config in configs} == {"float32"}
    over = configs[0].model
    assert replace(over, precision="auto").precision == "bfloat16"  # unless somebody says so


def long_run(world: World, device: str, **changes: Any) -> Workload:
    work = prepare(from_settings(world.settings(method=["homlora"], **changes)))
    return replace(work, device=torch.device(device))


def test_passes_are_compiled_where_a_run_is_long_enough_on_an_accelerator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = long_run(world, "cuda", rounds=1, steps=1)
    operations = compiling.training_operations(short, "homlora", 1)
    repaid = operations * 10 / compiling.lengths(short)
    monkeypatch.setitem(compiling.REPAID_PER_LENGTH, "encoder", repaid)
    assert not compiling.compiles(short, "homlora", 1)
    assert compiling.compiles(long_run(world, "cuda", rounds=11, steps=1), "homlora", 1)
    assert compiling.compiles(short, "homlora", 11)  # seeds are trained, too
    assert compiling.compiles(long_run(world, "cuda", rounds=4, steps=1), "pf2lora", 1)  # three gradients
    assert not compiling.compiles(long_run(world, "cpu", rounds=11, steps=1), "homlora", 1)


@pytest.mark.parametrize("said", [True, False])
def test_who_says_so_decides(said: bool, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiling.REPAID_PER_LENGTH, "encoder", 0.0 if not said else float("inf"))
    work = long_run(world, "cuda", rounds=1, steps=1, compile=said)
    assert compiling.compiles(work, "homlora", 1) is said
    assert "compile" not in to_dict(from_settings(world.settings()))["model"]


def test_a_run_says_that_it_compiles_and_why(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody said so: as many operations, and from how many on it is repaid."""
    work = long_run(world, "cuda", rounds=1, steps=1)
    assert compiling.why(work, "homlora", 1) == ""
    monkeypatch.setitem(compiling.REPAID_PER_LENGTH, "encoder", 1.0)
    operations, count = compiling.training_operations(work, "homlora", 1), compiling.lengths(work)
    assert compiling.why(work, "homlora", 1) == (
        f"passes are compiled (--compile): about {operations:.1e} operations of training, and batches of "
        f"{count} length{'s' if count > 1 else ''} repay it from {count:.1e} on"
    )
    asked = long_run(world, "cuda", rounds=1, steps=1, compile=True)
    assert compiling.why(asked, "homlora", 1) == ""  # nobody needs to be told what they asked for
    monkeypatch.setattr(compiling, "why", lambda *_: "passes are compiled")
    lines: list[str] = []
    compare(
        from_settings(world.settings(method=["homlora"], rounds=1, steps=1)), Watcher(on_note=lines.append)
    )
    assert "homlora: passes are compiled" in lines


def test_the_estimate_is_near_what_is_counted(world: World) -> None:
    """A second way: the operations that torch counts in every step. They have attention, the head and the adapters as
    well, which are no small part of a tiny model."""
    work = long_run(world, "cpu", rounds=2, steps=3)
    ready = set_up(work, "homlora", 0)
    (outcome,) = trial.run(ready, lambda seed, record: None)
    counted = 2 * (outcome.record.flops_per_round or 0)
    assert 0.4 < compiling.training_operations(work, "homlora", 1) / counted < 1.2
