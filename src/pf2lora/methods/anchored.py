"""What FedProx, Ditto and FedDPA share: a client remembers the common x̄ with which its round began."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pf2lora.core.method import Method, State


@dataclass(frozen=True)
class Anchored(Method):
    """`s.opt` has an `anchor (M, shared)`: x̄, the last common x that was received, or the common start."""

    def anchor(self, x: Tensor) -> Tensor:
        """x̄ of clients that have just received x; a copy, as x is written over."""
        return x[:, : self.layout.shared].clone()

    def drift(self, x: Tensor, anchor: Tensor) -> Tensor:
        """`x − x̄`; zero where nothing is common (a personal head)."""
        shared = self.layout.shared
        return torch.cat([x[:, :shared] - anchor, torch.zeros_like(x[:, shared:])], dim=1)

    def receive(self, s: State, answer: Tensor, number: int) -> State:
        s = super().receive(s, answer, number)
        return s._replace(opt=s.opt._replace(anchor=self.anchor(s.x)))
