"""What FFA-LoRA and RoLoRA share: a step that trains some entries of x and leaves the others where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pf2lora.core.layout import Kind, Layout
from pf2lora.core.method import Loss, Method, State, gradients, variable
from pf2lora.core.optim import Moments, no_moments


@dataclass(frozen=True)
class Partly(Method):
    """The optimizer sees the trained part alone: what stands still has no gradient, no moments and no decay."""

    def without(self, frozen: Kind) -> Layout:
        """All of x but one kind of factor: the other one, and the head where it is trained."""
        return Layout.of(e for e in self.layout.entries if e.kind != frozen)

    def moments_of(self, x: Tensor, part: Layout) -> Moments:
        """The optimizer's state of a part of x before the first step."""
        return no_moments(self.layout.select(x, part))

    def step_on(
        self, part: Layout, F: Loss, s: State, moments: Moments, batch: Any
    ) -> tuple[Tensor, Moments, Tensor]:
        """x after one step on its entries in `part`, the optimizer's state of these, and the loss."""
        old = self.layout.select(s.x, part)
        part_ = variable(old)
        loss = F(self.layout.replaced(s.x, part, part_), s.y, batch)
        new, moments = self.descend(gradients(loss, part_)[0], moments, old)
        return self.layout.replaced(s.x, part, new), moments, loss.detach()
