"""What clients choose by: the loss of a model on rows that it was neither trained nor is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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
        found = trial.workload.task.losses(trial.model, x, y, rows, clients)
        real = torch.arange(found.shape[1]) < sizes
        return found.masked_fill(real.to(found.device) & ~torch.isfinite(found), torch.inf)

    return losses


def scores(trial: Trial, models: tuple[Tensor, Tensor]) -> Tensor:
    """Every learner's headline score on its client's validation rows, the higher the better; nan where it has none. A
    headline that takes too long for every round (generated text) gives way to the loss."""
    workload, task = trial.workload, trial.workload.task
    assert workload.validation is not None
    whose = [k for _ in trial.seeds for k in range(len(workload.clients))]
    known = [i for i, k in enumerate(whose) if workload.clients[k].validation]
    rows = workload.validation.of([whose[i] for i in known])
    at = torch.tensor(known, device=models[0].device)
    common, personal = (t.index_select(0, at) for t in models)
    answers = task.predict(trial.model, common, personal, rows)
    found = task.score_clients(answers, [workload.clients[whose[i]].validation for i in known])
    values = torch.full((len(whose),), torch.nan, dtype=torch.float64)
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
