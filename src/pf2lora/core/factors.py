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


def truncated(B: Tensor, A: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors `(…, m, rank)` and `(…, rank, n)` of the matrix of that rank nearest to `B (…, m, R) @ A (…, R, n)`, its
    largest singular value first and shared equally by both; zeros where the product has a lower rank, but for rounding.

    By QR decompositions of the factors: the singular value decomposition is of an R × R matrix at most, and the product
    is never multiplied out.
    """
    left, L = torch.linalg.qr(B)
    right, R = torch.linalg.qr(A.mT)
    U, S, V = torch.linalg.svd(L @ R.mT, full_matrices=False)
    rounding = S[..., :1] * max(B.shape[-2], A.shape[-1]) * torch.finfo(S.dtype).eps
    root, kept = S.where(rounding < S, 0).sqrt().unsqueeze(-2), min(rank, S.shape[-1])
    new_B, new_A = left @ (U * root), (right @ (V.mT * root)).mT
    missing = rank - kept
    return (
        torch.nn.functional.pad(new_B[..., :kept], (0, missing)),
        torch.nn.functional.pad(new_A[..., :kept, :], (0, 0, 0, missing)),
    )


def scaled(factor: Tensor, scaling: float) -> Tensor:
    """A scaling of 1, which is the default, costs nothing."""
    return factor if scaling == 1 else factor * scaling
