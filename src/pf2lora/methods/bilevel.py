"""What the two bilevel methods share: α, the way to the second-order term, and a way that watches its size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.hypergradient import HYPERGRADIENTS, Hyper, Shift
from pf2lora.core.method import Method, State
from pf2lora.core.optim import Moments
from pf2lora.errors import unknown

AUTO = "auto"
MEASURED_FOR = 100  # local steps for which `auto` believes a measured share
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # of a base model's precision


class Watched(NamedTuple):
    """What `auto` keeps beside the moments: a client's last measured share, and its steps since."""

    moments: Moments
    share: Tensor  # (M, 1) nan before the first measurement
    age: Tensor  # (M, 1)


@dataclass(frozen=True)
class Bilevel(Method):
    """`hypergradient_mode` is the way to the second-order term (exact, difference, none), or "auto": `difference` until
    a client's share is known, then `none` while it is under what the base model's `precision` resolves, and measured
    again now and then. What a client does depends on nobody else.
    """

    hypergradient_mode: str = "difference"
    precision: str = "float32"

    derived: ClassVar[frozenset[str]] = frozenset({"layout", "precision"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hypergradient_mode not in (*HYPERGRADIENTS, AUTO):
            raise unknown("hypergradient mode", self.hypergradient_mode, [*HYPERGRADIENTS, AUTO])
        if self.precision not in ROUNDOFF:
            raise unknown("precision", self.precision, ROUNDOFF)

    @property
    @abstractmethod
    def alpha(self) -> float:
        """α, the lower level's rate."""

    @property
    def effective_mode(self) -> str:
        """How this very step gets its second-order term; `auto` itself is the one that measures."""
        return "difference" if self.hypergradient_mode == AUTO else self.hypergradient_mode

    def shift(self, lower: Tensor) -> Shift:
        """The root of the roundoff, of `lower` or of its step: what rounding adds to the second-order term falls with
        the shift and what F's third derivatives add grows with it, and there the two are about equal.
        """
        root = ROUNDOFF[self.precision] ** 0.5
        return Shift(root * lower.norm(dim=1, keepdim=True), least=root)

    def init(self, x: Tensor, y: Tensor) -> State:
        s = super().init(x, y)
        if self.hypergradient_mode != AUTO:
            return s
        unknown_share = torch.full_like(s.opt.step, torch.nan)
        return s._replace(opt=Watched(s.opt, unknown_share, torch.zeros_like(s.opt.step)))

    def variants_for_round(self, s: State, number: int) -> list[Method]:
        if self.hypergradient_mode != AUTO:
            return super().variants_for_round(s, number)
        known = (s.opt.share < ROUNDOFF[self.precision]) & (s.opt.age < MEASURED_FOR)
        without: Method = replace(self, hypergradient_mode="none")
        return [without if skip else self for skip in known.flatten().tolist()]

    def follow(self, hyper: Hyper, s: State) -> tuple[Tensor, Any]:
        """x after the optimizer's step along the hypergradient, and what is kept."""
        if not isinstance(s.opt, Watched):
            return self.descend(hyper.gradient, s.opt, s.x)
        x, moments = self.descend(hyper.gradient, s.opt.moments, s.x)
        if hyper.share is None:
            return x, Watched(moments, s.opt.share, s.opt.age + 1)
        return x, Watched(moments, hyper.share.unsqueeze(1), torch.zeros_like(s.opt.age))

    def notes(self) -> list[str]:
        if self.hypergradient_mode != "exact":
            return []
        return ["exact second order, so its attention runs on the kernel that has a double backward"]

    def findings(self, shares: Sequence[float | None]) -> list[str]:
        """One line on where `auto` left the second-order term out."""
        known = [share for share in shares if share is not None]
        if self.hypergradient_mode != AUTO or not known:
            return []
        return [
            f"second order (auto): left out in {len(shares) - len(known)} of {len(shares)} client-rounds; where it was "
            f"measured it was {max(known):.1e} of the hypergradient at most, and {self.precision} resolves "
            f"{ROUNDOFF[self.precision]:.1e}"
        ]
