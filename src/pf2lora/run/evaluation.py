"""How good every client's model is, at both points of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.method import State, moved, take
from pf2lora.run.config import TrainingSettings
from pf2lora.run.result import Numbers, OverClients
from pf2lora.run.set_up import Trial
from pf2lora.tasks.base import Example
from pf2lora.tasks.settings import Metric

EXAMPLES = 3  # answers of each client that a report shows


class Measured(NamedTuple):
    """Every metric of every client: None where it is undefined or was not computed, nan where it is not a number; and
    some of the answers to be read."""

    scores: dict[str, list[float | None]]
    examples: list[list[Example]]


def evaluation_rounds(training: TrainingSettings) -> set[int]:
    """The rounds after which clients are measured: the last always, about ten in all."""
    every = training.evaluate_every or -(-training.rounds // 10)
    return {*range(every, training.rounds + 1, every), training.rounds}


def models_in_use(trial: Trial, state: State, number: int) -> tuple[Tensor, Tensor]:
    """The (x, y) every client is measured with after round `number`; a pooled learner's is everybody's."""
    common, personal = state.x, state.y
    if trial.method.adapts_before_use:
        clients, schedule = range(len(trial.source.names)), trial.schedule
        per_pass = schedule.clients_per_pass or len(clients)
        next_batch = number * schedule.steps * trial.method.draws
        found = []
        for i in range(0, len(clients), per_pass):
            together = clients[i : i + per_pass]
            part = moved(take(state, together), trial.workload.device)
            batch = trial.source.draw(together, [next_batch] * len(together))
            found.append([t.to(common.device) for t in trial.method.personal(trial.F, part, batch)])
        common, personal = (torch.cat(parts) for parts in zip(*found))
    count = len(trial.workload.clients)
    return (
        (common.expand(count, -1), personal.expand(count, -1)) if trial.method.pooled else (common, personal)
    )


def measure(trial: Trial, common: Tensor, personal: Tensor, *, final: bool = False) -> Measured:
    """Every client on its own test data; `final` also does what is too costly for every round."""
    workload, task = trial.workload, trial.workload.task
    answers = task.predict(trial.model, common, personal, workload.test, final=final)
    scores = task.score_clients(answers, [client.test for client in workload.clients])
    shown = [
        [task.example(a, row) for a, row in zip(found[:EXAMPLES], client.test)]
        for found, client in zip(answers, workload.clients)
    ]
    return Measured(
        {metric: [s.get(metric) for s in scores] for metric in task.metrics},
        [[example for example in client if example is not None] for client in shown],
    )


def finite(value: float | None) -> float | None:
    """The number, or None where it is none: as JSON can hold it."""
    return None if value is None or not math.isfinite(value) else value


def finite_numbers(values: Sequence[float | None]) -> Numbers:
    return [finite(value) for value in values]


def over_clients(values: Sequence[float | None], metric: Metric) -> OverClients:
    """A metric's list with its mean, worst client and spread over the clients for which it is defined.

    A score that is not a finite number leaves no mean: dropping that client would flatter the rest.
    """
    known = [v for v in values if v is not None]
    shown = finite_numbers(values)
    if not known or not all(map(math.isfinite, known)):
        return OverClients(shown, None, None, None)
    mean = sum(known) / len(known)
    worst = min(known) if metric.higher_is_better else max(known)
    return OverClients(shown, mean, worst, math.sqrt(sum((v - mean) ** 2 for v in known) / len(known)))


def summary(metrics: dict[str, Metric], scores: dict[str, Any] | None) -> dict[str, OverClients] | None:
    """All metrics over clients; None where nothing was measured."""
    if scores is None:
        return None
    return {name: over_clients(values, metrics[name]) for name, values in scores.items()}


def not_finite(names: Sequence[str], metrics: dict[str, Metric], scores: dict[str, Any] | None) -> list[str]:
    """A warning for each client with a score that is not a number."""
    found = []
    for k, name in enumerate(names):
        bad = [metrics[m].label for m, values in (scores or {}).items() if _bad(values[k])]
        if bad:
            found.append(
                f"client {name!r}: its model's outputs are not finite ({', '.join(bad)}); it has diverged"
            )
    return found


def _bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
