"""Ditto (Li et al., *Ditto: Fair and Robust Federated Learning Through Personalization*, 2021).

x by FedAvg; beside it each client trains a whole copy v of its own, `min_v f_k(v) + λ/2 ‖v − x̄‖²`, x̄ the x that its
round began with, and uses that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import Loss, State, StepStats, gradients, variable
from pf2lora.core.optim import Moments, no_moments
from pf2lora.methods.anchored import Anchored


class WithCopy(NamedTuple):
    """What a client keeps. v is no y: y is added to x, and v stands in its place."""

    moments: Moments
    anchor: Tensor  # (M, shared) x̄
    own: Tensor  # (M, P) v
    own_moments: Moments


@dataclass(frozen=True)
class Ditto(Anchored):
    """`penalty` is λ: 0 gives Local beside HOMLoRA; as it grows, v comes to x̄."""

    penalty: float = 0.1

    name: ClassVar[str] = "ditto"
    label: ClassVar[str] = "Ditto"
    summary: ClassVar[str] = "FedAvg, and a whole copy per client that is held near the average"
    personal_part: ClassVar[str] = "a copy of x"
    gradients_per_step: ClassVar[int] = 2
    adapts_before_use: ClassVar[bool] = True
    personal_draws: ClassVar[int] = 0
    per_client: ClassVar[frozenset[str]] = Anchored.per_client | {"penalty"}

    def init(self, x: Tensor, y: Tensor) -> State:
        return State(x, y, WithCopy(no_moments(x), self.anchor(x), x.clone(), no_moments(x)))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_ = variable(s.x)
        x, moments = self.descend(gradients(F(x_, s.y, batch), x_)[0], s.opt.moments, s.x)
        v, v_ = s.opt.own, variable(s.opt.own)
        loss = F(v_, s.y, batch)
        gradient = gradients(loss, v_)[0] + self.penalty * self.drift(v, s.opt.anchor)
        v, own_moments = self.descend(gradient, s.opt.own_moments, v)
        return State(x, s.y, WithCopy(moments, s.opt.anchor, v, own_moments)), StepStats(loss.detach())

    def personal(self, F: Loss, s: State, *batches: Any) -> tuple[Tensor, Tensor]:
        return s.opt.own, s.y

    def own_numbers(self, personal: Layout) -> int:
        return self.layout.size
