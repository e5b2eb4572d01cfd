"""RoLoRA (Chen et al., *Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA*, NeurIPS 2025).

Rounds alternate: odd ones `min_B (1/M) Σ_k f_k(s·B Ā)`, even ones `min_A (1/M) Σ_k f_k(s·B̄ A)`; only the factor that
moved is sent and averaged. As the other one is common, the average of the factors is the average of the products in
every round, and A learns too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pf2lora.core.layout import Kind, Layout
from pf2lora.core.method import Loss, Method, State, StepStats, Updates
from pf2lora.core.optim import Moments
from pf2lora.methods.partly import Partly


class TwoMoments(NamedTuple):
    """An optimizer for each kind of round, over what it trains."""

    up: Moments  # of B and the head
    down: Moments  # of A and the head


@dataclass(frozen=True)
class RoLoRA(Partly):
    """A head that is trained goes with both. `moving` is the factor that a round trains."""

    moving: Kind = "B"

    name: ClassVar[str] = "rolora"
    label: ClassVar[str] = "RoLoRA"
    summary: ClassVar[str] = "rounds alternate between B and A: trained, sent and averaged"
    sent_part: ClassVar[str] = "B or A, and the head"
    merges_mean: ClassVar[bool] = True
    derived: ClassVar[frozenset[str]] = frozenset({"layout", "moving"})

    def moves(self, number: int) -> Kind:
        """The factor that round `number` trains."""
        return "B" if number % 2 else "A"

    def variants_for_round(self, s: State, number: int) -> list[Method]:
        return [replace(self, moving=self.moves(number))] * len(s.x)

    def init(self, x: Tensor, y: Tensor) -> State:
        parts = self.without("A"), self.without("B")
        return State(x, y, TwoMoments(*(self.moments_of(x, part) for part in parts)))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        if self.moving == "B":
            x, up, loss = self.step_on(self.without("A"), F, s, s.opt.up, batch)
            return State(x, s.y, s.opt._replace(up=up)), StepStats(loss)
        x, down, loss = self.step_on(self.without("B"), F, s, s.opt.down, batch)
        return State(x, s.y, s.opt._replace(down=down)), StepStats(loss)

    # --- a round's end: half is sent, and a client that was away gets the whole ---

    def leaves(self, number: int) -> Layout:
        return self.layout.shared_kinds(self.moves(number), "head")

    def arrives(self, number: int) -> Layout:
        """Both factors, once both have been averaged: who was away has missed the other one. Before that, A is where
        all began."""
        return self.layout.shared_part if number > 1 else self.leaves(1)

    def first_server(self, like: Tensor) -> tuple[Tensor]:
        """The last average of everything that is shared; of A there is none before round 2."""
        return (like.new_zeros(self.layout.shared),)

    def merge(self, sent: Updates, server: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        whole, average = self.layout.shared_part, self.average(sent.numbers, sent.weights)
        last = whole.replaced(server[0].unsqueeze(0), self.leaves(sent.round), average)
        return whole.select(last, self.arrives(sent.round))[0], (last[0],)
