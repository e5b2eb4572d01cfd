"""What clients choose by: the loss of a model on rows that it was neither trained nor is tested on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pf2lora.core.method import Judge
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


def sampled_judge(trial: Trial, learners: Sequence[int]) -> Judge:
    """On a sample of the validation rows: what is asked after every round must cost little beside it."""
    return judge(trial, learners, trial.workload.validation_sample)
