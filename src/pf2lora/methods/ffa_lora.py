"""FFA-LoRA (Sun et al., *Improving LoRA in Privacy-preserving Federated Learning*, ICLR 2024).

`min_B (1/M) Σ_k f_k(s·B A_0)`: A stays at the common start A_0, so that the average of the factors is that of the
products, `Σ_k w_k B_k A_0 = (Σ_k w_k B_k) A_0`, and half as much is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import Loss, State, StepStats
from pf2lora.core.optim import OPTIMIZERS, Moments
from pf2lora.errors import UserError
from pf2lora.methods.partly import Partly


@dataclass(frozen=True)
class FFALoRA(Partly):
    """B (and the head) are trained, sent and averaged. With A at rest the product moves less than where both factors
    move, and a larger scaling s is nothing but a larger rate of B: `b_lr_ratio` is by how many times B's rate is above
    `lr`, which remains the head's; 1 gives both the same.
    """

    b_lr_ratio: float = 4.0

    name: ClassVar[str] = "ffa-lora"
    label: ClassVar[str] = "FFA-LoRA"
    summary: ClassVar[str] = "A stays at the common start, B is trained and averaged: the mean of BA is exact"
    sent_part: ClassVar[str] = "B and the head"

    def leaves(self, number: int) -> Layout:
        return self.layout.shared_kinds("B", "head")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.b_lr_ratio > 0:
            raise UserError(f"b_lr_ratio is {self.b_lr_ratio}; it must be above 0")

    def descend(self, gradient: Tensor, moments: Moments, x: Tensor) -> tuple[Tensor, Moments]:
        """x, of B and the head, after one step of the optimizer with a rate for each of its numbers."""
        parts = self.without("A").entries
        ratios = ((e.size, self.b_lr_ratio if e.kind == "B" else 1.0) for e in parts)
        rates = self.lr * torch.cat([x.new_full((size,), ratio) for size, ratio in ratios])
        return OPTIMIZERS[self.optimizer](gradient, moments, x, rates, weight_decay=self.weight_decay)

    def init(self, x: Tensor, y: Tensor) -> State:
        return State(x, y, self.moments_of(x, self.without("A")))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x, moments, loss = self.step_on(self.without("A"), F, s, s.opt, batch)
        return State(x, s.y, moments), StepStats(loss)

    def trained_numbers(self, s: State) -> list[int]:
        return [self.without("A").adapter_size] * len(s.x)
