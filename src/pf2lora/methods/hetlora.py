"""HETLoRA (Cho et al., 2024): a rank per client, truncation, self-pruning, sparsity-weighted aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from pf2lora.core.method import Loss, Method, State, StepStats, Surroundings, gradients, variable
from pf2lora.core.optim import Moments, no_moments
from pf2lora.core.ranks import product_norm
from pf2lora.errors import UserError


class Ranked(NamedTuple):
    """A client's optimizer state, its rank r_k, and its tail's size when the round began."""

    adam: Moments
    rank: Tensor  # (M,) int64
    tail: Tensor  # (M,)


def initial_ranks(clients: int, r_min: int, r_max: int) -> list[int]:
    """`r_k = ⌊r_min + (r_max − r_min)(k − 1)/M⌋`."""
    return [r_min + (r_max - r_min) * k // clients for k in range(clients)]


@dataclass(frozen=True)
class HetLoRA(Method):
    """`penalty` is λ, `gamma` the share of the columns that is not penalised; λ = 0 and r_min = r_max give
    HOMLoRA up to the aggregation's weights. `ranks` are the clients' first ranks; the adapter's rank is r_max.
    """

    ranks: tuple[int, ...] = ()
    r_min: int = 1
    gamma: float = 0.99
    penalty: float = 5e-3
    weight_by: str = "client"

    name: ClassVar[str] = "hetlora"
    label: ClassVar[str] = "HETLoRA"
    summary: ClassVar[str] = "a rank per client, self-pruning, averages weighted by ‖BA‖"
    sent_part: ClassVar[str] = "x of its rank"
    personal_part: ClassVar[str] = "its rank"
    not_private: ClassVar[str] = "the ranks that its clients send follow from their data"
    derived: ClassVar[frozenset[str]] = frozenset({"layout", "ranks"})
    run_defaults: ClassVar[Mapping[str, str]] = {
        "r_min": "the run's rank",
        "r_max": "half as much again as the run's rank",
    }

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        return super().parameters() | {"r_max": int}

    @classmethod
    def adapter_ranks(cls, rank: int, client_rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
        """The adapter has rank r_max; without one it is half as much again as the run's rank."""
        rank = given.get("rank", rank)
        return given.get("r_max", rank + rank // 2), 0

    @classmethod
    def set_up(cls, run: Surroundings, settings: Mapping[str, Any]) -> Self:
        """First ranks go by a client's place among all, from r_min (the run's rank) to r_max (the adapter's)."""
        r_max = max(entry.shape[0] for entry in run.layout.entries if entry.kind == "A")
        r_min = settings.get("r_min", min(run.rank, r_max))
        ranks = initial_ranks(run.clients, r_min, r_max)
        return cls(
            run.layout, **dict(settings) | {"r_min": r_min, "ranks": tuple(ranks[k] for k in run.positions)}
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma < 1:
            raise UserError(f"gamma is {self.gamma}; HETLoRA's sparsity parameter lies between 0 and 1")
        if self.weight_by not in ("client", "module"):
            raise UserError(f"weight_by is {self.weight_by!r}; HETLoRA weighs by 'client' or by 'module'")
        if self.r_min < 1:
            raise UserError(f"r_min is {self.r_min}; it must be at least 1")
        if any(rank < self.r_min for rank in self.ranks):
            raise UserError(f"a first rank of {min(self.ranks)} lies below r_min = {self.r_min}")
        r_max = max((entry.shape[0] for entry in self.layout.entries if entry.kind == "A"), default=0)
        if any(rank > r_max for rank in self.ranks):
            raise UserError(f"a first rank of {max(self.ranks)} is above the adapter's rank, r_max = {r_max}")

    def init(self, x: Tensor, y: Tensor) -> State:
        if len(self.ranks) != len(x):
            raise UserError(
                f"HETLoRA has {len(self.ranks)} first ranks for {len(x)} clients; each client needs one"
            )
        rank = torch.tensor(self.ranks, device=x.device)
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

    def ranks_of(self, s: State) -> list[int | None]:
        return [int(rank) for rank in s.opt.rank]

    def kept_columns(self, rank: Tensor) -> Tensor:
        """t = ⌊γ r_k⌋, the columns that are not penalised."""
        return (self.gamma * rank.double() + 1e-9).floor().long()

    def kept(self, rank: Tensor, x: Tensor) -> Tensor:
        """One for every number of x that belongs to a client's first `rank` rows of A or columns of B."""
        return torch.cat(
            [self.within(e.kind, e.shape, 0 * rank, rank).flatten(1) for e in self.layout.entries], 1
        ).to(x)

    def within(self, kind: str, shape: tuple[int, ...], first: Tensor, last: Tensor) -> Tensor:
        """Which entries of a factor lie in the rank interval [first, last) of each client."""
        if kind not in ("A", "B"):
            return torch.ones(len(last), *shape, dtype=torch.bool, device=last.device)
        rank_axis = 1 if kind == "A" else 2
        view = [-1 if axis == rank_axis else 1 for axis in range(3)]
        position = torch.arange(shape[rank_axis - 1], device=last.device).view(view)
        inside = (position >= first.view(-1, 1, 1)) & (position < last.view(-1, 1, 1))
        return inside.expand(len(last), *shape)

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
