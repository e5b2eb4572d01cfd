"""When clients are measured, with which model, and what is made of their answers: each by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Problem, regression_problem

from pf2lora.core.method import Method, State
from pf2lora.engines.local import Schedule
from pf2lora.engines.room import Room
from pf2lora.methods.centralized import Centralized
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.run.config import TrainingSettings
from pf2lora.run.evaluation import (
    Models,
    finite_numbers,
    measure,
    models_in_use,
    not_finite,
    over_clients,
    summary,
)
from pf2lora.run.rounds import evaluation_rounds, measured_rounds, never_stops
from pf2lora.tasks.base import Example, Task
from pf2lora.tasks.classification.task import METRICS


@pytest.mark.parametrize(
    ("rounds", "every", "expected"),
    [
        (1, None, {1}),
        (10, None, set(range(1, 11))),
        (11, None, {2, 4, 6, 8, 10, 11}),
        (25, None, {3, 6, 9, 12, 15, 18, 21, 24, 25}),
        (100, None, set(range(10, 101, 10))),
        (10, 4, {4, 8, 10}),
        (3, 5, {3}),
        (4, 1, {1, 2, 3, 4}),
    ],
)
def test_about_ten_rounds_are_measured_and_the_last_always(
    rounds: int, every: int | None, expected: set[int]
) -> None:
    assert evaluation_rounds(TrainingSettings(rounds=rounds, evaluate_every=every)) == expected


def test_costly_evaluations_are_fewer() -> None:
    assert measured_rounds(20, None) == set(range(2, 21, 2))
    assert measured_rounds(20, None, times=5) == {4, 8, 12, 16, 20}
    assert measured_rounds(20, None, times=3) == {7, 14, 20}
    assert measured_rounds(20, None, times=1) == {20}
    assert measured_rounds(20, 5, times=1) == {5, 10, 15, 20}  # as somebody said


def test_patience_that_cannot_end_a_run_is_said() -> None:
    """The first evaluation begins it, and at the last the run is over anyway."""

    def said(patience: int | None, times: int = 10, rounds: int = 20, heard_after: int = 0) -> list[str]:
        settings = TrainingSettings(rounds=rounds, patience=patience)
        return never_stops(settings, measured_rounds(rounds, None, times), heard_after=heard_after)

    assert said(None) == said(8) == said(1, times=3) == []
    line = "--patience 9 cannot stop this run early, which is evaluated 10 times (--evaluate-every)"
    assert said(9) == [line] and said(40) == [line.replace("9", "40", 1)]
    assert said(2, times=3) and said(1, times=2)
    assert said(1, times=1) == [line.replace("9", "1", 1).replace("10 times", "once")]
    # A federation's server hears of a round with the next one's answers.
    assert said(3, rounds=5) == [] and said(3, rounds=5, heard_after=1)
    assert said(2, rounds=5, heard_after=1) == [] and said(8, heard_after=1) == []


# ---- with which model ----


def trial_of(p: Problem, method: Method, clients: int = 3, **schedule: Any) -> Any:
    workload = SimpleNamespace(device=torch.device("cpu"), clients=[None] * clients, validation=None)
    plan = Schedule(rounds=9, steps=5, **schedule)
    rates = plan.rates_of(clients)
    return SimpleNamespace(
        method=method,
        F=p.F,
        source=p.source,
        schedule=plan,
        workload=workload,
        rates=rates,
        room=Room(plan.clients_per_pass),
    )


@pytest.mark.parametrize("per_pass", [None, 1, 2, 3])
def test_a_client_that_adapts_before_use_does_so_on_its_next_batch(per_pass: int | None) -> None:
    """After round n of s steps of two batches it has drawn 2sn: it is measured with x − α∇F(x) on the next one, whoever
    shares its pass."""
    p = regression_problem()
    x = p.x * torch.tensor([[1.0], [0.7], [1.3]], dtype=torch.float64)
    method = PerFedAvg(p.layout, adaptation_lr=0.3)
    trial = trial_of(p, method, clients_per_pass=per_pass)
    found, y = models_in_use(trial, method.init(x, p.y), 4)
    assert torch.equal(y, p.y) and found.shape == p.x.shape
    for k in range(3):
        x_ = x[[k]].clone().requires_grad_()
        loss = p.F(x_, p.y[[k]], p.source.draw([k], [2 * 5 * 4]))
        (gradient,) = torch.autograd.grad(loss.sum(), x_)
        torch.testing.assert_close(found[[k]], (x_ - 0.3 * gradient).detach(), rtol=0, atol=1e-14)
    other, _ = models_in_use(trial, method.init(x, p.y), 5)
    assert not torch.allclose(other, found)  # another batch


@pytest.mark.parametrize("host", ["cpu", "meta"])
def test_a_client_adapts_on_the_device_and_is_kept_where_the_states_are(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = regression_problem()
    method = PerFedAvg(p.layout)
    adapted_on: list[str] = []

    def personal(self: Method, F: Any, part: State, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        adapted_on.extend(t.device.type for t in (part.x, part.y))
        return p.x[:1], p.y[:1]  # a device of their own: the CPU

    monkeypatch.setattr(PerFedAvg, "personal", personal)
    trial = trial_of(p, method, clients_per_pass=1)
    trial.workload.device = torch.device("meta")
    x, y = models_in_use(trial, method.init(p.x.to(host), p.y.to(host)), 1)
    assert set(adapted_on) == {"meta"} and (x.device.type, y.device.type) == (host, host)


def test_the_others_are_measured_as_they_are_and_a_pooled_learner_is_everybodys() -> None:
    p = regression_problem()
    method = HomLoRA(p.layout)
    x, y = models_in_use(trial_of(p, method), state := method.init(p.x, p.y), 1)
    assert x is state.x and y is state.y
    pooled = Centralized(p.layout)
    alone: State = pooled.init(p.x[:1], p.y[:1])
    x, y = models_in_use(trial_of(p, pooled, clients=4), alone, 1)
    assert torch.equal(x, alone.x.expand(4, -1)) and torch.equal(y, alone.y.expand(4, -1))


# ---- what is made of the answers ----


class Asked:
    """A task that answers every row with its number, and remembers what it was asked."""

    metrics = METRICS

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def predict(self, model: Any, x: Any, y: Any, rows: Any, *, final: bool) -> list[list[int]]:
        self.asked.append((model, x, y, rows, final))
        return [[1, 2, 3, 4, 5], [6, 7]]

    def score_clients(self, answers: Any, rows: Any) -> list[dict[str, float | None]]:
        assert [len(found) for found in answers] == [len(asked) for asked in rows]
        return [{"accuracy": 0.25, "loss": 2.0}, {"accuracy": 0.5}]

    def resampled(self, answers: Any, rows: Any, draws: Any) -> tuple[Any, Any, int]:
        return answers, rows, draws.shape[1]

    labels = ("yes", "no")
    shown_examples = 3
    examples = Task.examples

    def confusion(self, answers: Any, rows: Any) -> list[list[int]]:
        return [[len(answers), len(rows)]]

    def example(self, answer: int, row: str) -> Example | None:
        return None if answer == 2 else Example(row, (), str(answer))


def test_scores_and_a_few_examples_of_every_client() -> None:
    task = Asked()
    clients = [SimpleNamespace(name="n", test=list("abcde")), SimpleNamespace(name="s", test=list("fg"))]
    test = SimpleNamespace(of=lambda clients: ("encoded rows", clients))
    config = SimpleNamespace(output=SimpleNamespace(examples=None))
    workload = SimpleNamespace(task=task, test=test, clients=clients, config=config)
    trial: Any = SimpleNamespace(workload=workload, model="model", seeds=(7,), measured_fully=True)
    x, y = torch.zeros(2, 1), torch.ones(2, 1)
    found = measure(trial, Models(x, y))
    assert set(found.scores) == set(METRICS)
    assert found.scores["accuracy"] == [0.25, 0.5] and found.scores["loss"] == [2.0, None]
    last = measure(trial, Models(x, y), final=True)
    shown = [[(e.prompt, e.output, e.row) for e in client] for client in last.examples]
    assert shown == [
        [("a", "1", 0), ("c", "3", 2)],
        [("f", "6", 0), ("g", "7", 1)],
    ]  # of the first three, those that say something
    assert last.confusion == [[[5, 5]], [[2, 2]]] and last.of(slice(1, 2)).confusion == [[[2, 2]]]
    config.output.examples = 1
    assert [len(client) for client in measure(trial, Models(x, y), final=True).examples] == [1, 1]
    task.asked.pop()
    assert found.resampled == found.confusion == [] and found.examples == [
        [],
        [],
    ]  # drawn at the end alone, as many rows as a client has
    assert last.resampled == [([1, 2, 3, 4, 5], list("abcde"), 5), ([6, 7], list("fg"), 2)]
    assert [final for *_, final in task.asked] == [False, True]
    model, x_asked, y_asked, rows, _ = task.asked[0]
    assert (model, rows) == ("model", ("encoded rows", [0, 1])) and x_asked is x and y_asked is y


def test_a_summary_has_every_metric_by_its_own_direction() -> None:
    scores = {"accuracy": [0.25, 0.75], "loss": [1.0, 3.0]}
    found = summary(METRICS, scores)
    assert found == {name: over_clients(values, METRICS[name]) for name, values in scores.items()}
    assert (found["accuracy"].worst, found["loss"].worst) == (0.25, 3.0)
    assert (found["accuracy"].mean, found["loss"].mean) == (0.5, 2.0)
    assert (found["accuracy"].spread, found["loss"].spread) == (0.25, 1.0)
    assert summary(METRICS, None) is None


def test_numbers_that_are_none_become_none() -> None:
    assert finite_numbers([0.5, None, math.nan, math.inf, -math.inf, 0.0]) == [
        0.5,
        None,
        None,
        None,
        None,
        0.0,
    ]


def test_every_client_with_a_bad_score_is_named_with_all_of_them() -> None:
    scores = {"accuracy": [math.nan, 0.5, 0.5], "loss": [math.inf, 0.3, -math.inf]}
    first, last = not_finite(["north", "south", "west"], METRICS, scores)
    assert first == (
        f"client 'north': its model's outputs are not finite "
        f"({METRICS['accuracy'].label}, {METRICS['loss'].label}); it has diverged"
    )
    assert "'west'" in last and f"({METRICS['loss'].label})" in last
    assert not_finite(["north"], METRICS, None) == []
