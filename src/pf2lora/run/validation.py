"""What clients choose by: the loss of a model on rows that it was neither trained nor is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from pf2lora.core.choice import Judge
from pf2lora.engines.batches import Encoded
from pf2lora.run.set_up import Trial


def judge(trial: Trial, learners: Sequence[int], rows: Encoded | None) -> Judge:
    """`(x, y) ↦` the learners' losses on their clients' `rows`, inf where a model's outputs are no numbers."""
    assert rows is not None
    clients = [i % len(trial.workload.clients) for i in learners]
    sizes = torch.tensor(rows.of(clients).sizes()).unsqueeze(1)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return numbers(trial.workload.task.losses(trial.model, x, y, rows, clients), sizes)

    return losses


def numbers(losses: Tensor, sizes: Tensor) -> Tensor:
    """The losses of each learner's first `sizes` rows, inf where they are no numbers."""
    real = torch.arange(losses.shape[1]) < sizes
    return losses.masked_fill(real.to(losses.device) & ~torch.isfinite(losses), torch.inf)


def losses_and_scores(trial: Trial, models: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """All learners' losses on their clients' validation rows, and their scores where these come of the same pass."""
    workload, clients = trial.workload, clients_of(trial)
    assert workload.validation is not None
    losses, answers = workload.task.losses_and_predictions(trial.model, *models, workload.validation, clients)
    losses = numbers(losses.cpu(), torch.tensor(workload.validation.of(clients).sizes()).unsqueeze(1))
    if answers is None:
        return losses, None
    known = [i for i, k in enumerate(clients) if workload.clients[k].validation]
    return losses, headlines(trial, known, [answers[i] for i in known])


def scores(trial: Trial, models: tuple[Tensor, Tensor]) -> Tensor | None:
    """Every learner's headline score on its client's validation rows, the higher the better; nan where it has none. A
    headline that takes too long for every round (generated text) gives way to the loss, by which is chosen already:
    there is none then."""
    workload, task, clients = trial.workload, trial.workload.task, clients_of(trial)
    assert workload.validation is not None
    if task.writes or next(iter(task.metrics)) == "loss":
        return None
    known = [i for i, k in enumerate(clients) if workload.clients[k].validation]
    rows = workload.validation.of([clients[i] for i in known])
    at = torch.tensor(known, device=models[0].device)
    common, personal = (t.index_select(0, at) for t in models)
    return headlines(trial, known, task.predict(trial.model, common, personal, rows))


def clients_of(trial: Trial) -> list[int]:
    """Each learner's client."""
    return [k for _ in trial.seeds for k in range(len(trial.workload.clients))]


def headlines(trial: Trial, known: Sequence[int], answers: Sequence[Sequence[Any]]) -> Tensor:
    """The headline score of every learner, of whom the `known` ones have answered their validation rows."""
    workload, task, clients = trial.workload, trial.workload.task, clients_of(trial)
    found = task.score_clients(answers, [workload.clients[clients[i]].validation for i in known])
    values = torch.full((len(clients),), torch.nan, dtype=torch.float64)
    for i, of_client in zip(known, found):
        metric = next((m for m in task.metrics if of_client.get(m) is not None), None)
        if metric is not None:
            sign = 1 if task.metrics[metric].higher_is_better else -1
            values[i] = sign * float(of_client[metric])  # type: ignore[arg-type]
    return values


@dataclass(frozen=True)
class SampledJudges:
    """On a sample of the validation rows: what is asked before rounds must cost little beside them."""

    trial: Trial

    def __call__(self, learners: Sequence[int]) -> Judge:
        return judge(self.trial, learners, self.trial.workload.validation_sample)

    def batches(self, learner: int) -> Fraction:
        sample = self.trial.workload.validation_sample
        assert sample is not None
        start, stop = sample.spans[learner % len(self.trial.workload.clients)]
        return Fraction(stop - start, self.trial.source.size)
