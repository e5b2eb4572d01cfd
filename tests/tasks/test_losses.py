"""`Task.losses`: every example's loss of every learner's model, as `Task.loss` has it of the same rows one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny import tiny_data, tiny_model
from tiny_tasks import write_generation_task, write_question_task
from torch import Tensor

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.engines.room import Rooms
from pf2lora.run.config import from_settings
from pf2lora.tasks.base import Task
from pf2lora.tasks.classification.task import Classification


class Case(NamedTuple):
    task: Task[Any, Any]
    model: TwoLevelModel
    rows: Encoded  # of clients with different numbers of examples
    x: Tensor
    y: Tensor


def moved_start(model: TwoLevelModel, learners: int) -> tuple[Tensor, Tensor]:
    """Every learner has an x and a y of its own."""
    random = torch.Generator().manual_seed(0)
    x, y = model.initial(0, [str(k) for k in range(learners)], torch.float64)
    return tuple(t + 0.2 * torch.randn(t.shape, generator=random, dtype=t.dtype) for t in (x, y))  # type: ignore[return-value]


def classification(folder: Path) -> Case:
    model = TwoLevelModel(tiny_model("roberta"), AdapterSpec(rank=4, client_rank=2))
    task = Classification(None, ["0", "1", "2"])  # type: ignore[arg-type]
    return Case(task, model, tiny_data((5, 9, 2, 7)), *moved_start(model, 4))


def from_files(
    name: str, write: Callable[..., tuple[Path, list[Path]]], **settings: Any
) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        base, files = write(folder, ["a", "b", "c"])
        config = from_settings({"task": name} | settings, "test")
        task = config.task.build(str(base), [], None)
        model = TwoLevelModel(
            task.load_model(str(base), torch.float32).double(),
            AdapterSpec(rank=4, client_rank=2),
        )
        rows = [config.task.rows(config.task.read_records(file)) for file in files]
        return Case(task, model, task.encode(rows, training=False), *moved_start(model, 3))

    return make


CASES = {
    "classification": classification,
    "question-answering": from_files("question-answering", write_question_task, max_length=32, stride=4),
    "generation": from_files("generation", write_generation_task, max_length=64),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp("task"))


def of_one(case: Case, learner: int, rows: np.ndarray) -> Tensor:
    """`Task.loss` of one learner on these rows: the mean by the examples' weights."""
    x, y = case.x[learner : learner + 1], case.y[learner : learner + 1]
    return case.task.loss(case.model, x, y, Batch(1, case.rows.rows(rows)))[0]


@pytest.mark.parametrize("batch", [2, 64])
@pytest.mark.parametrize("clients_per_pass", [None, 1, 2])
def test_the_mean_is_the_clients_loss(
    case: Case, batch: int, clients_per_pass: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of learners, one client's rows more than once, and with any number in a pass."""
    monkeypatch.setattr(case.task, "evaluation_batch", batch)
    monkeypatch.setattr(case.task, "rooms", Rooms.of(clients_per_pass))
    learners, clients = [2, 0, 1, 2], [2, 1, 1, 0]
    at = torch.tensor(learners)
    found = case.task.losses(case.model, case.x[at], case.y[at], case.rows, clients)
    sizes = case.rows.sizes()
    assert found.shape == (4, max(sizes[k] for k in clients)) and found.dtype == torch.float64
    for i, (learner, k) in enumerate(zip(learners, clients)):
        start, stop = case.rows.starts[k : k + 2]
        assert not found[i, : stop - start].isnan().any() and found[i, stop - start :].isnan().all()
        expected = of_one(case, learner, np.arange(start, stop))
        torch.testing.assert_close(found[i].nanmean(), expected.detach(), rtol=0, atol=1e-12)
    assert not torch.allclose(found[1].nanmean(), found[2].nanmean())  # two models on one client's rows


def test_every_example_has_its_own_loss(case: Case) -> None:
    """The longest first. Where examples weigh differently, a loss is times its weight over the client's mean weight."""
    found = case.task.losses(case.model, case.x, case.y, case.rows, range(len(case.x)))
    for k, (start, stop) in enumerate(case.rows.spans):
        order = start + np.argsort(-case.rows.lengths[start:stop], kind="stable")
        losses, weights = [], []
        for row in order:
            batch = Batch(1, case.rows.rows(np.array([row])))
            x, y = case.x[k : k + 1], case.y[k : k + 1]
            loss, weight = case.task.example_losses(case.model, x, y, batch)
            losses.append(loss.item())
            weights.append(weight.item())
        expected = np.array(losses) / np.mean(weights)
        np.testing.assert_allclose(found[k, : stop - start].numpy(), expected, rtol=0, atol=1e-12)
    if case.task.name == "generation":
        assert len(set(weights)) > 1  # or weights were not looked at


def test_nothing_is_kept_for_a_gradient(case: Case) -> None:
    x, y = case.x.clone().requires_grad_(), case.y.clone().requires_grad_()
    found = case.task.losses(case.model, x, y, case.rows, range(len(x)))
    assert not found.requires_grad and found.grad_fn is None
    loss = case.task.loss(case.model, x[:1], y[:1], Batch(1, case.rows.rows(np.arange(2))))
    assert loss.requires_grad and x.grad is None and y.grad is None


def test_a_client_without_rows_is_nan_all_over() -> None:
    empty = tiny_data((3, 0))
    task = Classification(None, ["0", "1", "2"])  # type: ignore[arg-type]
    model = TwoLevelModel(tiny_model("bert"), AdapterSpec(rank=4, client_rank=2))
    x, y = moved_start(model, 2)
    found = task.losses(model, x, y, empty, [0, 1])
    assert found.shape == (2, 3) and not found[0].isnan().any() and found[1].isnan().all()
    assert task.losses(model, x[1:], y[1:], empty, [1]).shape == (1, 0)
