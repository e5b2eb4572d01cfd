"""PF2LoRA without bilevel optimization (the ablation): `min_{x,y_k} (1/M) Σ_k f_k(x, y_k)`, x and y at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pf2lora.core.hypergradient import shortened
from pf2lora.core.method import Loss, State, StepStats, gradients, variable
from pf2lora.methods.own_size import OwnSize


@dataclass(frozen=True)
class PF2LoRAJoint(OwnSize):
    """One batch; x by AdamW and y by SGD (α = `client_lr`) from the gradients at the same (x, y)."""

    name: ClassVar[str] = "pf2lora-joint"
    label: ClassVar[str] = "PF2LoRA without bilevel"
    summary: ClassVar[str] = "the same two adapters without the bilevel step"
    personal_part: ClassVar[str] = "an adapter of rank r̃"

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_, y_ = variable(s.x), variable(s.y)
        loss = F(x_, y_, batch)
        gx, gy = gradients(loss, x_, y_)
        x, opt = self.descend(gx, s.opt, s.x)
        step, longest = self.rate * gy, self.longest(s.y)
        if longest is not None:
            step = shortened(step, longest) * step
        return State(x, s.y - step, opt), StepStats(loss.detach())
