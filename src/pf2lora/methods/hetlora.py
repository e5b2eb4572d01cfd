"""HETLoRA (Cho et al., 2024): a rank per client, truncation, self-pruning, sparsity-weighted aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.method import Loss, State, StepStats, gradients, variable
from pf2lora.core.optim import Moments, no_moments
from pf2lora.core.ranks import product_norm
from pf2lora.errors import UserError
from pf2lora.methods.rank_per_client import RankPerClient


class Ranked(NamedTuple):
    """A client's optimizer state, its rank r_k, and its tail's size when the round began."""

    adam: Moments
    rank: Tensor  # (M,) int64
    tail: Tensor  # (M,)


@dataclass(frozen=True)
class HetLoRA(RankPerClient):
    """`penalty` is λ, `gamma` the share of the columns that is not penalised; λ = 0 and r_min = r_max give
    HOMLoRA up to the aggregation's weights.
    """

    gamma: float = 0.99
    penalty: float = 5e-3
    weight_by: str = "client"

    name: ClassVar[str] = "hetlora"
    label: ClassVar[str] = "HETLoRA"
    summary: ClassVar[str] = "a rank per client, self-pruning, averages weighted by ‖BA‖"
    not_private: ClassVar[str] = "the ranks that its clients send follow from their data"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma < 1:
            raise UserError(f"gamma is {self.gamma}; HETLoRA's sparsity parameter lies between 0 and 1")
        if self.weight_by not in ("client", "module"):
            raise UserError(f"weight_by is {self.weight_by!r}; HETLoRA weighs by 'client' or by 'module'")

    def init(self, x: Tensor, y: Tensor) -> State:
        rank = self.first_ranks(x)
        x = x * self.kept(rank, x)
        return State(x, y, Ranked(no_moments(x), rank, self.tail(x, rank)))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_ = variable(s.x)
        loss = F(x_, s.y, batch)
        penalised = loss + self.penalty * self.tail(x_, s.opt.rank)
        kept = self.kept(s.opt.rank, s.x)
        gradient = gradients(penalised, x_)[0] * kept  # truncated entries stay exactly zero
        x, adam = self.descend(gradient, s.opt.adam, s.x)
        return State(x, s.y, s.opt._replace(adam=adam)), StepStats(loss.detach())

    def send(self, s: State, number: int) -> tuple[State, Tensor]:
        """Self-pruning: where the tail fell over the round, it is cut off."""
        tail, rank = self.tail(s.x, s.opt.rank), s.opt.rank
        pruned = torch.where(tail < s.opt.tail, self.kept_columns(rank).clamp_min(self.r_min), rank)
        kept = self.kept(pruned, s.x)
        adam = s.opt.adam._replace(mean=s.opt.adam.mean * kept, square=s.opt.adam.square * kept)
        s = State(s.x * kept, s.y, Ranked(adam, pruned, tail))
        return s, s.x[:, : self.layout.shared]

    def average(self, sent: Tensor, weights: Tensor) -> Tensor:
        """Sparsity-weighted: client k weighs ‖B_kA_k‖_F / Σ_j ‖B_jA_j‖_F, whatever its data's size."""
        norms = self.product_norms(sent)  # (K, modules)
        by_client = shares(norms.square().sum(1).sqrt())
        if self.weight_by == "client":
            return by_client @ sent
        modules = {up.module: i for i, (up, _) in enumerate(self.layout.pairs("B", "A"))}
        merged = []
        for entry in self.layout.shared_entries:
            start = self.layout.offsets[entry.name]
            weight = shares(norms[:, modules[entry.module]]) if entry.module in modules else by_client
            merged.append(weight @ sent[:, start : start + entry.size])
        return torch.cat(merged)

    def receive(self, s: State, answer: Tensor, number: int) -> State:
        """Truncation: a client takes the first r_k rows of A and columns of B."""
        s = super().receive(s, answer, number)
        x = s.x * self.kept(s.opt.rank, s.x)
        return State(x, s.y, s.opt._replace(tail=self.tail(x, s.opt.rank)))

    def kept_columns(self, rank: Tensor) -> Tensor:
        """t = ⌊γ r_k⌋, the columns that are not penalised."""
        return (self.gamma * rank.double() + 1e-9).floor().long()

    def tail(self, x: Tensor, rank: Tensor) -> Tensor:
        """`Σ_modules ‖B[:, t:r_k]‖_F · ‖A[t:r_k, :]‖_F` of each client."""
        views, t = self.layout.unpack(x), self.kept_columns(rank)
        total = x.new_zeros(x.shape[0])
        for up, down in self.layout.pairs("B", "A"):
            B = views[up.name] * self.within("B", up.shape, t, rank)
            A = views[down.name] * self.within("A", down.shape, t, rank)
            total = total + torch.linalg.vector_norm(B, dim=(1, 2)) * torch.linalg.vector_norm(A, dim=(1, 2))
        return total

    def product_norms(self, sent: Tensor) -> Tensor:
        """‖B_kA_k‖_F per client and module."""
        norms = []
        for up, down in self.layout.pairs("B", "A"):
            B, A = (part(sent, self.layout.offsets[e.name], e.shape) for e in (up, down))
            norms.append(product_norm(A, B))
        return torch.stack(norms, dim=1)


def part(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """One entry of the flat rows."""
    return flat[:, start : start + shape[0] * shape[1]].unflatten(1, shape)


def shares(norms: Tensor) -> Tensor:
    """Weights in proportion to norms; equal ones where all are zero."""
    total = norms.sum()
    return norms / total if total > 0 else torch.full_like(norms, 1 / len(norms))
