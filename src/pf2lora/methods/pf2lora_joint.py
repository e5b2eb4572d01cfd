"""PF2LoRA without bilevel optimization (the ablation): `min_{x,y_k} (1/M) Σ_k f_k(x, y_k)`, x and y at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pf2lora.core.method import Loss, Method, State, StepStats, gradients, variable


@dataclass(frozen=True)
class PF2LoRAJoint(Method):
    """One batch; x by AdamW and y by SGD (α = `client_lr`) from the gradients at the same (x, y)."""

    client_lr: float = 0.03

    name: ClassVar[str] = "pf2lora-joint"
    label: ClassVar[str] = "PF2LoRA without bilevel"
    two_level: ClassVar[bool] = True

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_, y_ = variable(s.x), variable(s.y)
        loss = F(x_, y_, batch)
        gx, gy = gradients(loss, x_, y_)
        x, opt = self.descend(gx, s.opt, s.x)
        return State(x, s.y - self.client_lr * gy, opt), StepStats(loss.detach())
