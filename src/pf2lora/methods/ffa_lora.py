"""FFA-LoRA (Sun et al., *Improving LoRA in Privacy-preserving Federated Learning*, ICLR 2024).

`min_B (1/M) Σ_k f_k(s·B A_0)`: A stays at the common start A_0, so that the average of the factors is that of the
products, `Σ_k w_k B_k A_0 = (Σ_k w_k B_k) A_0`, and half as much is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import Loss, State, StepStats
from pf2lora.methods.partly import Partly


@dataclass(frozen=True)
class FFALoRA(Partly):
    """B (and the head) are trained, sent and averaged. A moves nothing: at the same rate the product moves less than
    with both factors trained, so `lr` may be several times the others'; the scaling s is nothing but another rate then.
    """

    name: ClassVar[str] = "ffa-lora"
    label: ClassVar[str] = "FFA-LoRA"
    summary: ClassVar[str] = "A stays at the common start, B is trained and averaged: the mean of BA is exact"
    sent_part: ClassVar[str] = "B and the head"

    def leaves(self, number: int) -> Layout:
        return self.layout.shared_kinds("B", "head")

    def init(self, x: Tensor, y: Tensor) -> State:
        return State(x, y, self.moments_of(x, self.without("A")))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x, moments, loss = self.step_on(self.without("A"), F, s, s.opt, batch)
        return State(x, s.y, moments), StepStats(loss)

    def trained_numbers(self, s: State) -> list[int]:
        return [self.without("A").adapter_size] * len(s.x)
