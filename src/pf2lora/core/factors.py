"""Both adapters of a layer as one: `s·BA + s̃·D_kC_k = [sB, s̃D_k] [A; C_k]`, a product of rank r + r̃."""

from __future__ import annotations

import torch
from torch import Tensor


def down(A: Tensor, C: Tensor | None) -> Tensor:
    """`[A; C] (…, r + r̃, n)`."""
    return A if C is None else torch.cat([A, C], dim=-2)


def up(B: Tensor, D: Tensor | None, scaling: float, client_scaling: float) -> Tensor:
    """`[sB, s̃D] (…, m, r + r̃)`."""
    B = scaled(B, scaling)
    return B if D is None else torch.cat([B, scaled(D, client_scaling)], dim=-1)


def scaled(factor: Tensor, scaling: float) -> Tensor:
    """A scaling of 1, which is the default, costs nothing."""
    return factor if scaling == 1 else factor * scaling
