"""A device with memory for so many sequences at once: whatever a run does in a pass, it does with less of it, says so,
and comes to the numbers of a run that had the room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from little_world import World, make_world
from torch import Tensor

import pf2lora
from pf2lora.adapters.layers import Adapted
from pf2lora.engines import room
from pf2lora.engines.room import Room
from pf2lora.run.config import from_settings
from pf2lora.run.set_up import set_up
from pf2lora.run.validation import judge
from pf2lora.run.workload import load_workload

SmallDevice = Callable[[int, int], None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> SmallDevice:
    """Memory for so many sequences in a pass whose gradient is taken, and in one that only answers."""
    forward = Adapted.forward
    monkeypatch.setattr(room, "free_memory", lambda: None)  # which takes its time, and frees no stand-in's

    def bound(trained: int, answered: int) -> None:
        def bounded(self: Adapted, u: Tensor) -> Tensor:
            if len(u) > (trained if torch.is_grad_enabled() else answered):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return forward(self, u)

        monkeypatch.setattr(Adapted, "forward", bounded)

    return bound


def said(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    """What was said of passes of a kind: how many there were at a time from then on."""
    lines = [r.getMessage() for r in caplog.records if f" in {kind}: from here on" in r.getMessage()]
    return [line.split("out of memory with ")[1].split(f" in {kind}")[0] for line in lines]


@pytest.mark.parametrize("method", ["pf2lora", pytest.param("per-fedavg", marks=pytest.mark.slow)])
def test_a_whole_run_on_a_small_device(
    method: str, world: World, small_device: SmallDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """From the baselines to what is deployed. A client's batch is of 8 rows: it is trained on in parts."""
    settings = world.settings(method=method, validation_ratio=0.2, personal_steps=1)
    expected = pf2lora.federate(**settings)
    small_device(5, 6)
    found = pf2lora.federate(**settings)
    assert said(caplog, "a pass") == ["3 clients", "8 rows of a client"]
    assert "3 clients" in said(caplog, "an answering pass")
    untrained = [r.baselines["untrained"].scores["loss"].per_client for r in (found, expected)]
    assert untrained[0] == pytest.approx(untrained[1], abs=1e-6)
    assert found.methods[method].runs[0].flops_per_round is None  # which takes a whole step at once
    ours, theirs = (r.methods[method].runs[0] for r in (found, expected))
    for a, b in zip(ours.rounds, theirs.rounds):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)
        assert a.validation_loss == pytest.approx(b.validation_loss, abs=1e-5)
    for point in ("served", "deploy"):
        losses = [getattr(run, point)["loss"].per_client for run in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert [c.candidate for c in ours.choices or ()] == [c.candidate for c in theirs.choices or ()]


class Recorded:
    """Recorded steps that take the memory of one row."""

    held = True

    def forget(self) -> bool:
        held, self.held = self.held, False
        return held


def test_recordings_are_forgotten_before_a_row_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = world.settings(validation_ratio=0.2)
    trial = set_up(load_workload(from_settings(settings, "test")), "homlora", 0)
    rows = trial.workload.validation
    expected = judge(trial, [0], rows)(trial.state.x[:1], trial.state.y[:1])
    recorded, forward = Recorded(), Adapted.forward

    def bounded(self: Adapted, u: Tensor) -> Tensor:
        if len(u) > 1 - recorded.held:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, u)

    monkeypatch.setattr(Adapted, "forward", bounded)
    answering = trial.workload.task.rooms.answering
    answering.clients, answering.rows = 1, 1
    trial.room.holders.add(recorded)
    found = judge(trial, [0], rows)(trial.state.x[:1], trial.state.y[:1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not recorded.held and not caplog.records
    trial.model.remove()


def test_a_heavy_method_leaves_the_next_one_its_room(world: World) -> None:
    workload = load_workload(from_settings(world.settings(batch_size=8), "test"))
    heavy = set_up(workload, "pf2lora", 0)
    heavy.room.clients, heavy.room.rows = 1, 2
    heavy.workload.task.rooms.answering.clients = 1
    heavy.workload.task.note("said by a copy")
    heavy.model.remove()
    light = set_up(workload, "homlora", 0)
    assert (light.room.clients, light.room.rows) == (None, 8)
    assert light.workload.task.rooms.answering.clients is None
    assert isinstance(light.room, Room) and "said by a copy" in workload.task.notes
    light.model.remove()
