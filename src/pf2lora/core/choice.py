"""Choosing on few rows: who judges by them, how far one model's losses are below another's, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor

Judge = Callable[[Tensor, Tensor], Tensor]
"""`(x, y) ↦` each client's losses `(M, n)` on its validation rows, nan behind the last one. Their mean is its loss."""


class Judges(Protocol):
    """Who judges the learners of a run before a round, by validation rows."""

    def __call__(self, learners: Sequence[int]) -> Judge: ...

    def batches(self, learner: int) -> Fraction:
        """How many batches' worth of rows this learner is judged by."""
        ...


def gain(losses: Tensor, others: Tensor, caution: float) -> Tensor:
    """(M,) by how much the mean of `losses (M, n)` is below that of `others`, less `caution` standard errors of the
    difference, which is taken row by row; nan stands where a client has no more rows. Fewer than two rows say nothing.
    """
    difference = others - losses
    count = (~difference.isnan()).sum(1)
    mean = difference.nanmean(1)
    spread = (difference - mean.unsqueeze(1)).square().nansum(1) / (count - 1).clamp_min(1)
    error = (spread / count.clamp_min(1)).sqrt()
    sure = torch.where(mean.isinf(), mean, mean - caution * error)  # an infinite loss loses
    return torch.where(count < 2, -torch.inf, sure).nan_to_num(nan=-torch.inf)
