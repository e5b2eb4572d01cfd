"""A batch in parts: the loss and the gradients of the whole, for every method, with what one part keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Problem, build, tiny_problem
from tiny_language_models import CLIENTS, ROWS, TASK, loss_and_gradients, two_level, whole
from torch import Tensor

from pf2lora.adapters import two_level as two_level_module
from pf2lora.core.method import gradients, variable
from pf2lora.core.second_order import differentiable_twice
from pf2lora.engines.accumulation import mean_loss
from pf2lora.engines.batches import Batch, EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.engines.room import Room, Rooms
from pf2lora.tasks.classification.task import Classification


def in_parts(p: Problem, rows: int | None) -> Problem:
    task = Classification(None, ["0", "1", "2"])  # type: ignore[arg-type]
    task.rooms = Rooms.of(rows=rows)
    model = p.model
    assert model is not None
    return p._replace(F=lambda x, y, batch: task.loss(model, x, y, batch))


def gradient(p: Problem) -> tuple[Tensor, ...]:
    x, y = variable(p.x), variable(p.y)
    loss = p.F(x, y, p.source.draw([0, 1, 2], [1] * 3))
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=loss.dtype)  # what comes back is each client's own
    return loss.detach(), *gradients(loss * weights, x, y)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_parts_of_any_size_give_the_whole(rows: int, dropout: float) -> None:
    """A last part that is smaller, a part that is the whole; dropout masks are those of the whole."""
    p = tiny_problem("roberta", batch=5, dropout=dropout)
    for ours, expected in zip(gradient(in_parts(p, rows)), gradient(p)):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_weigh_differently(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of several lengths: a client's mean is over its tokens, not over its parts."""
    model, x, y = two_level("gpt2")
    expected = loss_and_gradients(model, x, y, whole())
    monkeypatch.setattr(TASK, "rooms", Rooms.of(rows=rows))
    for repeated in (False, True):
        model.repeat_layers(repeated)
        for ours, full in zip(loss_and_gradients(model, x, y, whole()), expected):
            torch.testing.assert_close(ours, full, rtol=1e-9, atol=1e-12)


def test_a_part_makes_logits_where_its_own_targets_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of a part is its own, known on the host: with the whole batch's it would be of all positions."""
    model, x, y = two_level("gpt2")
    names = [str(k) for k in range(CLIENTS)]
    found = []
    for room in (Room(), Room(rows=1)):
        asked: list[tuple[int | None, int, int]] = []
        original = two_level_module.target_losses

        def watched(
            layer: Any, hidden: Tensor, following: Tensor, counted: Tensor, most: int | None
        ) -> Tensor:
            asked.append((most, int(counted.sum()), counted.numel()))  # noqa: B023
            return original(layer, hidden, following, counted, most)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(two_level_module, "target_losses", watched)
            patched.setattr(TASK, "rooms", Rooms(training=room))
            batch = EncodedSource(ROWS, names, 3, seeds=(0,), room=room).draw(range(CLIENTS), [0] * CLIENTS)
            found.append(loss_and_gradients(model, x, y, batch))
        assert len(asked) == (1 if room.rows is None else 3)
        for most, targets, positions in asked:
            assert most is not None and targets <= most < positions
    assert batch.row_targets is not None and batch.row_targets < batch.length
    for whole_batch, parts in zip(*found):
        torch.testing.assert_close(parts, whole_batch, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("setting", ["pf2lora-difference", "pf2lora-exact", "homlora", "per-fedavg", "ditto"])
def test_a_run_is_the_same(setting: str) -> None:
    ends = []
    for rows in (None, 2):
        p = in_parts(tiny_problem("bert", batch=5), rows)
        method = build(setting, p)
        *_, last = train(method, p.F, method.init(p.x, p.y), p.source, Schedule(2, 2))
        ends.append(last.served.x)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-9)


def test_only_one_part_is_there_at_a_time() -> None:
    """Each part's graph is gone before the next one's pass; where a gradient is differentiated again all are one."""
    sizes: list[int] = []

    def sums(x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        sizes.append(batch.tensors["u"].shape[0])
        u = batch.tensors["u"].view(batch.clients, -1)
        return (x * u.sum(1, keepdim=True)).sum(1), torch.ones(batch.clients) * u.shape[1]

    batch = Batch(2, {"u": torch.arange(10.0)})
    x, y = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 0)
    loss = mean_loss(sums, x, y, batch, 2)
    assert sizes == [4, 4, 2] and loss.tolist() == [6.0, 21.0]
    (slope,) = torch.autograd.grad(loss.sum(), x)
    assert slope.tolist() == [[2.0] * 3, [7.0] * 3]
    with torch.no_grad():
        assert not mean_loss(sums, x, y, batch, 2).requires_grad
    sizes.clear()
    with differentiable_twice():
        mean_loss(sums, x, y, batch, 2)
    assert sizes == [10]


def test_a_setting_reaches_the_task(world_settings: dict[str, Any]) -> None:
    from pf2lora.run.config import from_settings
    from pf2lora.run.workload import load_workload

    workload = load_workload(from_settings(world_settings | {"micro_batch": 3}, "test"))
    assert workload.task.rooms.training.rows == 3


@pytest.fixture
def world_settings(tmp_path: Any) -> dict[str, Any]:
    from little_world import make_world

    return make_world(tmp_path).settings()
