"""Merges that a few bad updates cannot pull far: the median or the trimmed mean of each number (Yin et al., 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

TRIMMED = 0.2  # of the sites, at each end


def merged(rows: Tensor, how: str) -> Tensor:
    """One vector `(n,)` of the sites' `(K, n)`, number by number, in float64."""
    ordered = rows.double().sort(dim=0).values
    count = len(ordered)
    if how == "median":
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    cut = max(1, int(TRIMMED * count)) if count > 2 else 0
    return torch.mean(ordered[cut : count - cut], dim=0)
