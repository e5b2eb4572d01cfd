"""HOMLoRA: FedAvg on the common adapter, `min_x (1/M) Σ_k f_k(x)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pf2lora.core.method import Loss, Method, State, StepStats, gradients, variable


@dataclass(frozen=True)
class HomLoRA(Method):
    """Every client steps on its own loss; x is averaged."""

    name: ClassVar[str] = "homlora"
    label: ClassVar[str] = "HOMLoRA"
    summary: ClassVar[str] = "FedAvg on one LoRA"

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_ = variable(s.x)
        loss = F(x_, s.y, batch)
        x, opt = self.descend(gradients(loss, x_)[0], s.opt, s.x)
        return State(x, s.y, opt), StepStats(loss.detach())
