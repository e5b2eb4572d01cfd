"""A client that joins after training: the common adapter stays as it is, only its own is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pf2lora.core.hypergradient import shortened
from pf2lora.core.method import Loss, State, StepStats, gradients, variable
from pf2lora.core.optim import no_moments
from pf2lora.methods.own_size import OwnSize


@dataclass(frozen=True)
class Newcomer(OwnSize):
    """`y ← y − α ∇_y F(x, y)`, the lower level of PF2LoRA alone; a personal head learns beside it, at rate `lr`."""

    name: ClassVar[str] = "newcomer"
    label: ClassVar[str] = "own adapter on the common one"
    federated: ClassVar[bool] = False

    def init(self, x: Tensor, y: Tensor) -> State:
        return State(x, y, no_moments(x[:, self.layout.shared :]))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        common, head = s.x[:, : self.layout.shared], s.x[:, self.layout.shared :]
        head_, y_ = variable(head), variable(s.y)
        loss = F(torch.cat([common, head_], dim=1), y_, batch)
        g_head, g_y = gradients(loss, head_, y_)
        head, opt = self.descend(g_head, s.opt, head)
        step, longest = self.rate * g_y, self.longest(s.y)
        if longest is not None:
            step = shortened(step, longest) * step
        return State(torch.cat([common, head], dim=1), s.y - step, opt), StepStats(loss.detach())
