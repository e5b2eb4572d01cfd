"""Choosing on few rows: by how much one model's losses are below another's, and how sure that is."""

from __future__ import annotations

import torch
from torch import Tensor


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
