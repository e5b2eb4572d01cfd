"""What the adapters learned: singular values, ranks and sizes of their products, without forming a large matrix.

A product `up @ down` of rank R is never multiplied out: its singular values are those of an R × R matrix, from QR
decompositions of the two factors, and its Frobenius norm comes from two R × R Gram matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pf2lora.core.factors import down, up
from pf2lora.core.layout import Layout

SHARE = 0.9
ROUNDING = 1e-6  # of the sum: nine of ten equal singular values are nine tenths, whatever the rounding


def singular_values(down: Tensor, up: Tensor) -> Tensor:
    """The singular values of `up (…, m, R) @ down (…, R, n)` that can be other than zero, in descending order."""
    left = torch.linalg.qr(up, mode="r").R
    right = torch.linalg.qr(down.mT, mode="r").R
    return torch.linalg.svdvals(left @ right.mT)


def truncated_svd(down: Tensor, up: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """`U (m, rank), S (rank,), V (n, rank)` of `up (m, R) @ down (R, n)`, whose dense form is never made.

    The columns of U and V are orthonormal also where singular values are zero. A pair's sign is free: the largest entry
    of each column of V is positive, so that the same product gives the same factors.
    """
    left, right = torch.linalg.qr(up), torch.linalg.qr(down.mT)
    U, S, Vh = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    U, V = left.Q @ U[:, :rank], right.Q @ Vh[:rank].mT
    signs = V.gather(0, V.abs().argmax(0, keepdim=True)).sign()
    return U * signs, S[:rank], V * signs


def ninety_percent_rank(singular_values: Tensor) -> Tensor:
    """The paper's rank: how many of the largest singular values (last axis, descending) make up 90% of their sum.

    A zero matrix has rank 0.
    """
    sums = singular_values.cumsum(-1)
    total = sums[..., -1:]
    short = sums < (SHARE - ROUNDING) * total
    return (short.sum(-1) + 1) * (total[..., 0] > 0)


def product_norm(down: Tensor, up: Tensor) -> Tensor:
    """‖up @ down‖_F from the small Gram matrices: ‖BA‖² = ⟨BᵀB, AAᵀ⟩."""
    return ((up.mT @ up) * (down @ down.mT)).sum((-2, -1)).clamp_min(0).sqrt()


class Adapters(NamedTuple):
    """Clients' adapters `s·BA + s̃·D_kC_k`: x `(M, P)` and y `(M, Q)`, their layouts, and s and s̃."""

    layout_x: Layout
    layout_y: Layout
    x: Tensor
    y: Tensor
    scaling: float = 1.0
    client_scaling: float = 1.0

    def factors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each module's, down and up, of the whole sum."""
        common, own = self.layout_x.unpack(self.x), self.layout_y.unpack(self.y)
        for B, A in self.layout_x.pairs("B", "A"):
            C, D = own.get(f"{B.module}.C"), own.get(f"{B.module}.D")
            yield down(common[A.name], C), up(common[B.name], D, self.scaling, self.client_scaling)


def learned_ranks(adapters: Adapters) -> Tensor:
    """The rank by the 90% rule of `s·BA + s̃·D_kC_k`, per client and module `(M, modules)`."""
    ranks = [ninety_percent_rank(singular_values(down, up)) for down, up in adapters.factors()]
    return torch.stack(ranks, dim=1)


def client_share(adapters: Adapters) -> Tensor:
    """‖s̃·D_kC_k‖_F / ‖s·BA‖_F over all modules, per client `(M,)`; NaN where BA is zero, as before the first step."""
    own = adapters.client_scaling * _norm(adapters.layout_y, adapters.y, "D", "C")
    common = adapters.scaling * _norm(adapters.layout_x, adapters.x, "B", "A")
    return torch.where(common > 0, own / common, torch.nan)


def reduced_rank_regression(inputs: Tensor, targets: Tensor, rank: int) -> Tensor:
    """The W `(…, n, m)` of at most this rank that minimises ‖inputs W − targets‖_F (Reinsel and Velu, Theorem 2.2).

    The least-squares solution, projected on the `rank` leading principal directions of its fitted values.
    """
    full = torch.linalg.lstsq(inputs, targets).solution
    directions = torch.linalg.svd(inputs @ full, full_matrices=False).Vh[..., :rank, :]
    return full @ directions.mT @ directions


def _norm(layout: Layout, flat: Tensor, left: str, right: str) -> Tensor:
    """The Frobenius norm of all modules' products together, per client."""
    views = layout.unpack(flat)
    total = flat.new_zeros(flat.shape[0])
    for ups, downs in layout.pairs(left, right):  # type: ignore[arg-type]
        total = total + product_norm(views[downs.name], views[ups.name]).square()
    return total.sqrt()
