"""What HETLoRA and FlexLoRA share: a rank r_k per client, which has the first r_k rows of A and columns of B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pf2lora.core.method import Method, State, Surroundings
from pf2lora.errors import UserError


def initial_ranks(clients: int, r_min: int, r_max: int) -> list[int]:
    """`r_k = ⌊r_min + (r_max − r_min)(k − 1)/M⌋`."""
    return [r_min + (r_max - r_min) * k // clients for k in range(clients)]


@dataclass(frozen=True)
class RankPerClient(Method):
    """`ranks` are the clients' first ranks, from `r_min` to the adapter's rank, r_max. `s.opt.rank (M,)` has them."""

    ranks: tuple[int, ...] = ()
    r_min: int = 1

    derived: ClassVar[frozenset[str]] = frozenset({"layout", "ranks"})
    sent_part: ClassVar[str] = "x of its rank"
    personal_part: ClassVar[str] = "its rank"
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
        if self.r_min < 1:
            raise UserError(f"r_min is {self.r_min}; it must be at least 1")
        if any(rank < self.r_min for rank in self.ranks):
            raise UserError(f"a first rank of {min(self.ranks)} lies below r_min = {self.r_min}")
        r_max = max((entry.shape[0] for entry in self.layout.entries if entry.kind == "A"), default=0)
        if any(rank > r_max for rank in self.ranks):
            raise UserError(f"a first rank of {max(self.ranks)} is above the adapter's rank, r_max = {r_max}")

    def first_ranks(self, x: Tensor) -> Tensor:
        """(M,) the clients' first ranks."""
        if len(self.ranks) != len(x):
            raise UserError(
                f"{self.label} has {len(self.ranks)} first ranks for {len(x)} clients; each client needs one"
            )
        return torch.tensor(self.ranks, device=x.device)

    def ranks_of(self, s: State) -> list[int | None]:
        return [int(rank) for rank in s.opt.rank]

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
