"""SCAFFOLD (Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML 2020).

A client's step follows `g_k(x) − c_k + c`: its gradient, less what is its own about it (the control variate c_k), plus
what is everybody's (c, the mean of all c_k). At a round's end c_k becomes the mean of the round's gradients, and x and
the change of c_k are sent: twice the bytes, both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import Loss, Method, State, StepStats, Updates, gradients, variable
from pf2lora.core.optim import Moments, no_moments


class Controlled(NamedTuple):
    """What a client keeps; n is the shared part of x."""

    moments: Moments
    own: Tensor  # (M, n) c_k
    common: Tensor  # (M, n) c
    total: Tensor  # (M, n) the round's gradients so far
    steps: Tensor  # (M, 1) how many


@dataclass(frozen=True)
class Scaffold(Method):
    """The correction is made to the gradient before the run's optimizer sees it: with SGD this is the paper's algorithm
    (its option II, which the mean of a round's gradients equals then), with AdamW, on which LoRA depends, its natural
    extension. Control variates are of what is shared; a personal head takes its plain gradient. `clients` is N.
    """

    clients: int = 0

    name: ClassVar[str] = "scaffold"
    label: ClassVar[str] = "SCAFFOLD"
    summary: ClassVar[str] = "FedAvg whose clients correct their drift by control variates"
    sent_part: ClassVar[str] = "x and control variates"
    not_private: ClassVar[str] = "its clients send control variates beside x"
    merges_mean: ClassVar[bool] = True
    derived: ClassVar[frozenset[str]] = frozenset({"layout", "clients"})

    def leaves(self, number: int) -> Layout:
        """x and, of each of its entries, a control variate: c_k's change up, c down."""
        shared = self.layout.shared_entries
        return Layout.of([*shared, *(entry.beside("control") for entry in shared)])

    def init(self, x: Tensor, y: Tensor) -> State:
        own, common, total = (torch.zeros_like(x[:, : self.layout.shared]) for _ in range(3))
        return State(x, y, Controlled(no_moments(x), own, common, total, x.new_zeros(len(x), 1)))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        kept, shared = s.opt, self.layout.shared
        x_ = variable(s.x)
        loss = F(x_, s.y, batch)
        (gradient,) = gradients(loss, x_)
        g = gradient[:, :shared]
        corrected = torch.cat([g - kept.own + kept.common, gradient[:, shared:]], dim=1)
        x, moments = self.descend(corrected, kept.moments, s.x)
        kept = kept._replace(moments=moments, total=kept.total + g, steps=kept.steps + 1)
        return State(x, s.y, kept), StepStats(loss.detach())

    def send(self, s: State, number: int) -> tuple[State, Tensor]:
        """c_k becomes the mean of the round's gradients; its change leaves with x."""
        kept = s.opt
        own = torch.where(kept.steps > 0, kept.total / kept.steps.clamp_min(1), kept.own)
        stays = kept._replace(own=own, total=torch.zeros_like(own), steps=torch.zeros_like(kept.steps))
        return s._replace(opt=stays), torch.cat([s.x[:, : self.layout.shared], own - kept.own], dim=1)

    def first_server(self, like: Tensor) -> tuple[Tensor]:
        """c."""
        return (like.new_zeros(self.layout.shared),)

    def merge(self, sent: Updates, server: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        """x̄ ← Σ_k w_k x_k and c ← c + |S|/N Σ_k w_k Δc_k, over the clients S that took part."""
        x, change = self.average(sent.numbers, sent.weights).split(self.layout.shared)
        took_part = len(sent.clients)
        control = server[0] + took_part / max(self.clients, took_part) * change
        return torch.cat([x, control]), (control,)

    def with_answer(self, x: Tensor, answer: Tensor, number: int) -> Tensor:
        return self.layout.replaced(x, self.layout.shared_part, answer[..., : self.layout.shared])

    def receive(self, s: State, answer: Tensor, number: int) -> State:
        common = answer[..., self.layout.shared :].expand_as(s.opt.common)
        return super().receive(s, answer, number)._replace(opt=s.opt._replace(common=common))
