"""A lower level that finds its own size: `client_lr = "auto"`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from pf2lora.core.layout import NO_LAYOUT, Layout
from pf2lora.core.method import Judge, Method, State, Surroundings
from pf2lora.errors import UserError

AUTO: Literal["auto"] = "auto"
ALPHA = 0.1  # α where it is not given: rather too large, as what is too large is taken back
FIXED = 0.03  # α where there are no validation rows to take it back by
LONGEST = 1.0  # a step of y, per number of it, in steps of x (AdamW's are about η per number)
SIZES = (0.0, 0.6, 1.4)  # what a client tries to multiply its D by


@dataclass(frozen=True)
class OwnSize(Method):
    """`client_lr` is α, the rate of SGD on y, or "auto"."""

    client_lr: float | Literal["auto"] = AUTO
    personal_layout: Layout = NO_LAYOUT

    derived: ClassVar[frozenset[str]] = frozenset({"layout", "personal_layout"})
    two_level: ClassVar[bool] = True
    per_client: ClassVar[frozenset[str]] = Method.per_client | {"client_lr"}
    scheduled: ClassVar[tuple[str, ...]] = ("lr", "client_lr")

    @classmethod
    def set_up(cls, run: Surroundings, settings: Mapping[str, Any]) -> Self:
        """Without validation rows there is nothing to find a size by."""
        if settings.get("client_lr") == AUTO and not run.validated:
            settings = dict(settings) | {"client_lr": FIXED}
        return super().set_up(run, settings)

    @classmethod
    def adapter_ranks(cls, rank: int, client_rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
        rank, client_rank = super().adapter_ranks(rank, client_rank, given)
        if client_rank >= rank:
            raise UserError(
                f"client_rank is {client_rank} and rank {rank}; the client's adapter is the smaller one: "
                f"0 <= client_rank < rank"
            )
        return rank, client_rank

    @property
    def resizes(self) -> bool:
        return self.client_lr == AUTO

    def resizes_before(self, number: int, steps: int) -> bool:
        return self.resizes and number > 1

    @property
    def rate(self) -> float:
        return ALPHA if isinstance(self.client_lr, str) else self.client_lr

    def longest(self, y: Tensor) -> Tensor | None:
        if not self.resizes:
            return None
        return y.new_ones(len(y), 1) * (LONGEST * self.lr * y.shape[1] ** 0.5)

    def resize(self, s: State, judge: Judge, *, serving: bool = False) -> State:
        """D ← λD with the λ whose loss on the validation rows is least. What is served is never worse on them than the
        common adapter alone; without rows everything stays as it is."""
        tries = [torch.where(self.sized(s.y), size * s.y, s.y) for size in SIZES]
        if serving:
            tries.append(torch.zeros_like(s.y))
        y, best = s.y, judge(s.x, s.y).nanmean(1)
        for tried in tries:
            loss = judge(s.x, tried).nanmean(1)
            y = torch.where((loss < best).unsqueeze(1), tried, y)
            best = torch.minimum(best, loss)
        return s._replace(y=y)

    @classmethod
    def resize_passes(cls, settings: Mapping[str, Any], *, serving: bool = False) -> int:
        """As it is, with each size, and, to be served, without."""
        return 1 + len(SIZES) + serving if settings.get("client_lr", AUTO) == AUTO else 0

    def sized(self, y: Tensor) -> Tensor:
        """Which numbers of y a size multiplies: the D of D_kC_k. A part of the head is too small a thing to do harm."""
        parts = [y.new_full((e.size,), e.kind == "D", dtype=torch.bool) for e in self.personal_layout.entries]
        return torch.cat(parts) if parts else y.new_zeros(y.shape[1], dtype=torch.bool)
