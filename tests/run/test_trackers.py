"""Trackers: means over clients per round and nothing else; a missing package is said before anything begins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from little_world import SECRETS, World, make_world

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run import trackers
from pf2lora.run.result import RoundRecord

RECORD = RoundRecord(
    round=3,
    seconds=1.0,
    train_loss=[1.0, None, 2.0],
    validation_loss=[0.25, None, 0.75],
    served={"accuracy": [0.5, None, 1.0], "matthews": [None, None, None]},
    client_share=[0.1, 0.2, 0.3],
    ranks=[[1], [2], [3]],
)


class Recorder(ModuleType):
    """A stand-in for mlflow and wandb: it remembers what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **named: Any) -> Recorder:
            self.calls.append((name, args + tuple(sorted(named.items()))))
            return self

        return call

    def named(self, name: str) -> list[Any]:
        return [args for called, args in self.calls if called == name]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_means_over_the_clients_that_have_a_value() -> None:
    assert trackers.round_values("pf2lora", 1, RECORD) == {
        "pf2lora/seed-1/train_loss": 1.5,
        "pf2lora/seed-1/validation_loss": 0.5,
        "pf2lora/seed-1/client_share": pytest.approx(0.2),
        "pf2lora/seed-1/served/accuracy": 0.75,
    }


def test_mlflow_and_wandb_are_told_every_round(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow, wandb = Recorder("mlflow"), Recorder("wandb")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = world.settings(method=["pf2lora", "local"], seeds=2, rounds=3, title="a title")
    result = pf2lora.federate(**settings, out=tmp_path / "run", trackers=["mlflow", "wandb"])
    assert [name for name, _ in mlflow.calls[:2]] == ["start_run", "log_params"]
    assert mlflow.calls[-1][0] == "end_run" and wandb.calls[-1][0] == "finish"
    ours, theirs = mlflow.named("log_metrics"), wandb.named("log")
    assert [dict([step])["step"] for _, step in ours] == [
        1,
        1,
        2,
        2,
        3,
        3,
    ] * 2  # seeds side by side, methods in turn
    assert [values["round"] for (values,) in theirs] == [1, 1, 2, 2, 3, 3] * 2
    last = (result.methods["pf2lora"].runs[1].rounds[-1].served or {})["accuracy"]
    assert ours[5][0]["pf2lora/seed-1/served/accuracy"] == pytest.approx(sum(v or 0 for v in last) / 3)
    assert all(isinstance(v, float) for values, _ in ours for v in values.values())
    told = str(mlflow.calls) + str(wandb.calls)
    assert not any(word in told for word in SECRETS.values())
    assert dict(wandb.named("init")[0])["name"] == "a title"


def test_a_tracker_is_closed_when_the_run_fails(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with pytest.raises(UserError, match="became"):
        pf2lora.federate(**world.settings(lr=1e30, out=tmp_path / "run", trackers=["mlflow"]))
    assert mlflow.calls[-1][0] == "end_run"


@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_a_missing_package_names_its_extra(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, trackers.MODULES[name], None)
    with pytest.raises(UserError) as caught:
        pf2lora.federate(**world.settings(out=tmp_path / "run", trackers=[name]))
    assert str(caught.value) == (
        f"the tracker {name!r} needs the package {name!r}: pip install 'pf2lora[{name}]'"
    )
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown tracker 'wandbb'; did you mean 'wandb'\?"):
        pf2lora.federate(**world.settings(out=tmp_path / "run", trackers=["wandbb"]))


def test_tensorboard_writes_event_files(world: World, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pf2lora.federate(**world.settings(out=tmp_path / "run", trackers=["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("pf2lora/seed-0/train_loss")] == [1, 2]
