"""Per-FedAvg-LoRA: `min_x (1/M) Σ_k f_k(x − α ∇f_k(x))`, with the second-order term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pf2lora.core.hypergradient import Shift, bilevel
from pf2lora.core.method import Loss, State, StepStats, gradients, variable
from pf2lora.methods.bilevel import ROUNDOFF, Bilevel


@dataclass(frozen=True)
class PerFedAvg(Bilevel):
    """α = `adaptation_lr` is the rate of the one step that a client takes before it uses x, η = `lr` that of AdamW;
    α = 0 gives HOMLoRA on the outer batch. α moves all of x, so it is smaller than a client adapter's rate (paper: 1e-3
    … 1e-2).

    With H(x, u) = F(x + u), Per-FedAvg is the bilevel step from u = 0: u⁺ = −α∇F(x), and its hypergradient
    is (I − α∇²F(x)) ∇F(x − α∇F(x)). So it has the same ways to the second-order term as PF2LoRA.
    """

    adaptation_lr: float = 0.01

    name: ClassVar[str] = "per-fedavg"
    label: ClassVar[str] = "Per-FedAvg-LoRA"
    summary: ClassVar[str] = "a LoRA that is good after one step on a client's data (second order)"
    personal_part: ClassVar[str] = "x after one step"
    gradients_per_step: ClassVar[int] = 3
    draws: ClassVar[int] = 2
    adapts_before_use: ClassVar[bool] = True
    # α is part of what is minimized, as the step before use has it: no schedule changes it.
    per_client: ClassVar[frozenset[str]] = Bilevel.per_client | {"adaptation_lr"}

    def shift(self, lower: Tensor) -> Shift:
        """∇²F·v is a large part of the hypergradient: after the step αv it stands out of float32's rounding, and no
        longer shift is needed. In 16 bits it is too large for one side's error. Of both sides, the shortest shift that
        rounding allows: half the step αv, where the term is rounded no more than any difference of two gradients,
        and not under the roundoff of `lower`, where the shift itself would be lost.
        """
        if self.precision == "float32":
            return super().shift(lower)._replace(most=1.0)
        return Shift(ROUNDOFF[self.precision] * lower.norm(dim=1, keepdim=True), least=0.5, both_sides=True)

    @property
    def alpha(self) -> float:
        return self.adaptation_lr

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        inner, outer = batches

        def H(x: Tensor, u: Tensor, batch: Any) -> Tensor:
            return F(x + u, s.y, batch)

        u = torch.zeros_like(s.x)
        shift = self.shift(s.x)  # u is added to x: x is what it is small or large beside
        hyper = bilevel(H, s.x, u, self.alpha, self.effective_mode, inner, outer, outer, inner, shift)
        x, opt = self.follow(hyper, s)
        return State(x, s.y, opt), StepStats(hyper.loss, hyper.share)

    def personal(self, F: Loss, s: State, *batches: Any) -> tuple[Tensor, Tensor]:
        """x after one SGD step on a batch of the client's own training data."""
        (batch,) = batches
        x_ = variable(s.x)
        return s.x - self.alpha * gradients(F(x_, s.y, batch), x_)[0], s.y
