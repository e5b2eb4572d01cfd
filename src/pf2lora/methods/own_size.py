"""A lower level that finds its own size: `client_lr = "auto"`. A client without validation rows, which has nothing to
find one by, has a fixed α instead, wherever it is: beside others that have rows, or alone at its site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from pf2lora.core.choice import Judge
from pf2lora.core.layout import NO_LAYOUT, Layout
from pf2lora.core.method import GRADIENT, Method, State, Surroundings
from pf2lora.errors import UserError

AUTO: Literal["auto"] = "auto"
ALPHA = 0.1  # α where it is not given: rather too large, as what is too large is taken back
FIXED = 0.03  # α where there are no validation rows to take it back by
LONGEST = 1.0  # a step of y, per number of it, in steps of x (AdamW's are about η per number)
SMALLER, NONE, LARGER = 0.6, 0.0, 1.4  # what a client tries to multiply its D by
ASKED = 20  # one row for so many that training passes through the model is asked for sizes, about
SELDOM = 40  # local steps after which they are tried in any case: more seldom has not been measured


@dataclass(frozen=True)
class OwnSize(Method):
    """`client_lr` is α, the rate of SGD on y, or "auto"."""

    client_lr: float | Literal["auto"] = AUTO
    personal_layout: Layout = NO_LAYOUT
    validated: tuple[bool, ...] = ()  # which of the clients at hand have validation rows; empty: all

    derived: ClassVar[frozenset[str]] = frozenset({"layout", "personal_layout", "validated"})
    two_level: ClassVar[bool] = True
    per_client: ClassVar[frozenset[str]] = Method.per_client | {"client_lr"}
    scheduled: ClassVar[tuple[str, ...]] = ("lr", "client_lr")

    @classmethod
    def set_up(cls, run: Surroundings, settings: Mapping[str, Any]) -> Self:
        """Where nobody has validation rows α is fixed for all."""
        if settings.get("client_lr") == AUTO and not any(run.validated):
            settings = dict(settings) | {"client_lr": FIXED}
        return super().set_up(run, settings)

    def variants_for_round(self, s: State, number: int) -> list[Method]:
        """α is fixed for those who have no validation rows."""
        found = super().variants_for_round(s, number)
        if not self.resizes or all(self.validated):
            return found
        return [
            method if known else replace(method, client_lr=FIXED)  # type: ignore[call-arg]
            for method, known in zip(found, self.validated, strict=True)
        ]

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

    def resizes_before(self, done: int, steps: int, batches: Fraction) -> bool:
        """As often as costs a twentieth of the training, by the client's own steps: few rows are asked before every
        round, many less often. The size of what is served is tried in any case."""
        if not self.resizes or done == 0 or batches == 0:
            return False
        between = self.steps_between(batches)
        return done // between > (done - steps) // between

    @classmethod
    def steps_between(cls, batches: Fraction) -> Fraction:
        """Local steps from one resizing to the next."""
        return min(
            Fraction(SELDOM), ASKED * cls.resize_passes({}) * batches / (GRADIENT * cls.gradients_per_step)
        )

    @property
    def rate(self) -> float:
        return ALPHA if isinstance(self.client_lr, str) else self.client_lr

    def longest(self, y: Tensor) -> Tensor | None:
        if not self.resizes:
            return None
        return y.new_ones(len(y), 1) * (LONGEST * self.lr * y.shape[1] ** 0.5)

    def resize(self, s: State, judge: Judge, *, serving: bool = False) -> State:
        """D ← λD with the λ whose loss on the validation rows is least. What is served is never worse on them than the
        common adapter alone; without rows everything stays as it is.

        A smaller D is tried first, and then none where that is no worse, else a larger one: along λ the loss has one
        valley, or nearly so, and the other side of it need not be asked."""
        sized = self.sized(s.y)
        y, best = s.y, judge(s.x, s.y).nanmean(1)

        def offer(tried: Tensor) -> Tensor:
            nonlocal y, best
            loss = judge(s.x, tried).nanmean(1)
            y = torch.where((loss < best).unsqueeze(1), tried, y)
            best = torch.minimum(best, loss)
            return loss

        now = best
        too_large = (offer(torch.where(sized, SMALLER * s.y, s.y)) <= now).unsqueeze(1)
        offer(torch.where(sized, torch.where(too_large, NONE * s.y, LARGER * s.y), s.y))
        if serving:
            offer(torch.zeros_like(s.y))
        return s._replace(y=y)

    @classmethod
    def resize_passes(cls, settings: Mapping[str, Any], *, serving: bool = False) -> int:
        """As it is, with two sizes, and, to be served, without."""
        return 3 + serving if settings.get("client_lr", AUTO) == AUTO else 0

    @classmethod
    def resize_batches(cls, settings: Mapping[str, Any], batches: Fraction, steps: int) -> float:
        often = min(1.0, float(steps / cls.steps_between(batches))) if batches else 0.0
        return often * cls.resize_passes(settings) * float(batches)

    def sized(self, y: Tensor) -> Tensor:
        """Which numbers of y a size multiplies: the D of D_kC_k. A part of the head is too small a thing to do harm."""
        parts = [y.new_full((e.size,), e.kind == "D", dtype=torch.bool) for e in self.personal_layout.entries]
        return torch.cat(parts) if parts else y.new_zeros(y.shape[1], dtype=torch.bool)
