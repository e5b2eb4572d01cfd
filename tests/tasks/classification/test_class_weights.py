"""Class weights: torch's weighted cross entropy, with each client's own weights, wherever a loss is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, make_world
from tiny import LABELS, Problem, tiny_data, tiny_problem
from torch import Tensor
from torch.nn.functional import cross_entropy

import pf2lora
from pf2lora.core.hypergradient import Shift, bilevel
from pf2lora.core.method import gradients, variable
from pf2lora.core.second_order import differentiable_twice
from pf2lora.engines.batches import Batch, Encoded, EncodedSource
from pf2lora.errors import UserError
from pf2lora.run.config import from_settings
from pf2lora.run.workload import load_workload
from pf2lora.tasks.classification.settings import ClassificationSettings
from pf2lora.tasks.classification.task import Classification
from pf2lora.tasks.classification.weights import COLUMN, balanced_weights

BALANCED = Classification(
    None,  # type: ignore[arg-type]
    [str(i) for i in range(LABELS)],
    ClassificationSettings(class_weights="balanced"),
)


def labelled(*clients: list[int]) -> Encoded:
    """Rows with these labels."""
    data = tiny_data([len(labels) for labels in clients])
    return replace(data, row_columns={"labels": torch.tensor([label for own in clients for label in own])})


def weighted_problem() -> Problem:
    """Three clients of which one lacks a label, and their losses weighed."""
    p = tiny_problem("roberta")
    data = labelled([0, 0, 0, 1, 2], [1, 1, 1, 1, 1, 1, 1, 0, 2], [2, 0, 2, 2])
    source = EncodedSource(BALANCED.weighed(data, data), p.source.names, 4, (0,))
    model = p.model
    assert model is not None
    return p._replace(source=source, F=lambda x, y, b: BALANCED.loss(model, x, y, b))


def torchs(p: Problem, k: int, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """Client k's loss by torch, with the weights of its own rows by scikit-learn's formula."""
    assert isinstance(p.source, EncodedSource) and p.model is not None
    start, stop = p.source.data.starts[k : k + 2]
    own = p.source.data.row_columns["labels"][start:stop].tolist()
    weights = [len(own) / (len(set(own)) * own.count(c)) if c in own else 1.0 for c in range(LABELS)]
    logits = BALANCED.logits(p.model, x, y, batch)
    return cross_entropy(logits, batch.tensors["labels"], weight=torch.tensor(weights, dtype=torch.float64))


def test_weights_are_those_of_each_clients_own_counts() -> None:
    found = balanced_weights(labelled([0, 0, 0, 1], [2, 2]), 3)
    torch.testing.assert_close(
        found, torch.tensor([[4 / 6, 2.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_a_stacked_loss_is_each_clients_weighted_cross_entropy() -> None:
    """Of each client by itself: the mean over its own rows' weights, not over those of all."""
    p = weighted_problem()
    together = p.F(p.x, p.y, p.source.draw([0, 1, 2], [0, 0, 0]))
    plain = Classification(None, BALANCED.labels)  # type: ignore[arg-type]
    assert p.model is not None
    unweighted = plain.loss(p.model, p.x, p.y, without_weights(p.source.draw([0, 1, 2], [0, 0, 0])))
    for k in range(3):
        x, y, batch = p.x[k : k + 1], p.y[k : k + 1], p.source.draw([k], [0])
        torch.testing.assert_close(together[k], torchs(p, k, x, y, batch), rtol=0, atol=1e-12)
    assert (together - unweighted).abs().max() > 1e-3


def without_weights(batch: Batch) -> Batch:
    return replace(batch, tensors={n: t for n, t in batch.tensors.items() if n != COLUMN})


@pytest.mark.parametrize(("mode", "tolerance"), [("exact", 1e-10), ("difference", 1e-6), ("none", 1e-10)])
def test_a_bilevel_step_is_that_of_the_weighted_loss(mode: str, tolerance: float) -> None:
    """y⁺ and the hypergradient of each client, from torch's weighted loss by two nested gradients."""
    p, alpha = weighted_problem(), 0.1
    inner, outer = (p.source.draw([0, 1, 2], [n] * 3) for n in (0, 1))
    shift = Shift(1e-6 * p.y.norm(dim=1, keepdim=True), least=1e-6)
    found = bilevel(p.F, p.x, p.y, alpha, mode, inner, outer, outer, inner, shift)
    for k in range(3):
        x, y = variable(p.x[k : k + 1]), variable(p.y[k : k + 1])
        pi, xi = p.source.draw([k], [0]), p.source.draw([k], [1])
        with differentiable_twice():
            step = gradients(torchs(p, k, x, y, pi), y, graph=mode != "none")[0]
        y_next = y - alpha * (step if mode != "none" else step.detach())
        (expected,) = gradients(torchs(p, k, x, y_next, xi), x)
        torch.testing.assert_close(found.y[k : k + 1], y_next.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(found.gradient[k : k + 1], expected, rtol=0, atol=tolerance)


def test_what_is_chosen_by_is_weighed_and_what_is_measured_is_not(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    settings = world.settings(class_weights="balanced", validation_ratio=0.3)
    workload = load_workload(from_settings({k: v for k, v in settings.items() if k != "out"}, "test"))
    assert workload.validation is not None and workload.validation_sample is not None
    table = balanced_weights(workload.train, 2)
    for part in (workload.train, workload.validation, workload.validation_sample):
        for k, (start, stop) in enumerate(part.spans):
            own = part.row_columns["labels"][start:stop]
            torch.testing.assert_close(part.row_columns[COLUMN][start:stop], table[k][own])
    assert COLUMN not in workload.test.row_columns


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("method", ["pf2lora", "per-fedavg", "centralized"])
def test_a_run_with_balanced_weights(world: World, method: str) -> None:
    common: dict[str, Any] = {"method": method, "rounds": 2, "steps": 2, "client_lr": 0.05}
    runs = [
        pf2lora.federate(
            **world.settings(**common, class_weights=weights), out=world.root / f"{method}-{weights}"
        )
        for weights in ("none", "balanced")
    ]
    losses = [run.methods[method].runs[0].rounds[-1].train_loss for run in runs]
    assert losses[0] != losses[1] and all(loss is not None for loss in losses[1])


def test_what_is_no_weighting_is_refused() -> None:
    with pytest.raises(UserError, match=r"class weights 'equal' .*none, balanced"):
        ClassificationSettings(class_weights="equal")
