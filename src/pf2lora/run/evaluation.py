"""How good every client's model is, at both points of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pf2lora.core.method import State, moved, take
from pf2lora.core.resampling import resampled_rows
from pf2lora.run.differences import Resampled
from pf2lora.run.result import Numbers, OverClients
from pf2lora.run.set_up import Trial
from pf2lora.run.validation import judge
from pf2lora.tasks.base import Example
from pf2lora.tasks.settings import Metric

# Numbers of all clients' tables of labels; where there would be more, there is none.
MOST_CONFUSIONS = 100_000


class Models(NamedTuple):
    """The (x, y) of every learner as it is measured or deployed."""

    common: Tensor
    personal: Tensor


class Measured(NamedTuple):
    """Every metric of every learner: None where it is undefined or was not computed, nan where it is not a number; and
    some of the answers to be read."""

    scores: dict[str, list[float | None]]
    examples: list[list[Example]]
    resampled: list[np.ndarray | None] = []  # noqa: RUF012  the headline on resampled test rows (times,), at the end
    confusion: list[list[list[int]] | None] = []  # noqa: RUF012  by right label and answer, at the end

    def of(self, learners: slice) -> Measured:
        """The same for some learners alone."""
        scores = {metric: values[learners] for metric, values in self.scores.items()}
        return Measured(scores, self.examples[learners], self.resampled[learners], self.confusion[learners])

    def uncertainty(self) -> Resampled | None:
        """What the test rows leave open of these learners' scores; None where they do not say."""
        known = [values for values in self.resampled if values is not None and np.isfinite(values).all()]
        if not known or len(known) < len(self.resampled):
            return None
        means = np.mean(known, axis=0)
        return Resampled([round(float(v.std(ddof=1)), 6) for v in known], [round(float(m), 6) for m in means])


def models_in_use(trial: Trial, state: State, number: int, *, received: bool = True) -> Models:
    """The (x, y) every client uses after round `number`; a pooled learner's is everybody's.

    `received`: the average has come back, and a client whose method looks at validation rows then has done so.
    """
    method, schedule = trial.method, trial.schedule
    common, personal = state.x, state.y
    resizes = received and method.resizes and trial.workload.validation is not None
    if method.adapts_before_use or resizes:
        next_batch = number * schedule.steps * method.draws

        def adapt(together: list[int]) -> list[Tensor]:
            part = moved(take(state, together), trial.workload.device)
            if resizes:
                part = method.resize(part, judge(trial, together, trial.workload.validation), serving=True)
            numbers = range(next_batch, next_batch + method.personal_draws)
            batches = (trial.source.draw(together, [n] * len(together)) for n in numbers)
            adapting = method.with_rates(trial.rates.outside(method, together, part.x))
            return [t.to(state.x.device) for t in adapting.personal(trial.F, part, *batches)]

        found = [models for _, models in trial.room.passes(range(len(trial.source.names)), adapt)]
        common, personal = (torch.cat(parts) for parts in zip(*found))
    if method.pooled:
        count = len(trial.workload.clients)
        common, personal = (t.repeat_interleave(count, dim=0) for t in (common, personal))
    return Models(common, personal)


def measure(trial: Trial, models: Models, *, final: bool = False) -> Measured:
    """Every learner on its client's test data; `final` also does what is too costly for every round."""
    workload, task = trial.workload, trial.workload.task
    final = final and trial.measured_fully
    whose = [*range(len(workload.clients))] * len(trial.seeds)
    answers = task.predict(trial.model, *models, workload.test.of(whose), final=final)
    rows = [workload.clients[k].test for k in whose]
    scores = task.score_clients(answers, rows)
    resampled, confusion, most = [], list[list[list[int]] | None](), 0
    if final:
        asked = workload.config.output.examples
        most = task.shown_examples if asked is None else asked
        if len(workload.clients) * len(task.labels) ** 2 <= MOST_CONFUSIONS:
            confusion = [task.confusion(found, own) for found, own in zip(answers, rows)]
        for found, k in zip(answers, whose):
            client = workload.clients[k]
            draws = resampled_rows(client.name, len(client.test))
            resampled.append(task.resampled(found, client.test, draws))
    return Measured(
        {metric: [s.get(metric) for s in scores] for metric in task.metrics},
        [task.examples(found, own, most) for found, own in zip(answers, rows)],
        resampled,
        confusion,
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
