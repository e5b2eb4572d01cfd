"""A method of everything that a method may do at a round's end: another part in every round, a server that keeps
something, an answer for each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import Updates
from pf2lora.methods.homlora import HomLoRA


class Memory(NamedTuple):
    """What `Alternating`'s server keeps: a number for each client, and nested, the last round's sum."""

    seen: Tensor  # (clients,)
    inner: tuple[Tensor]  # (1,)


@dataclass(frozen=True)
class Alternating(HomLoRA):
    """Odd rounds exchange B, even ones A. The server counts whom it saw, and answers client k with k times the mean."""

    clients: int = 3

    name: ClassVar[str] = "alternating"
    label: ClassVar[str] = "Alternating"
    derived: ClassVar[frozenset[str]] = frozenset({"layout", "clients"})

    def leaves(self, number: int) -> Layout:
        return self.layout.shared_kinds("B" if number % 2 else "A")

    def first_server(self, like: Tensor) -> Memory:
        return Memory(like.new_zeros(self.clients), (like.new_zeros(1),))

    def merge(self, sent: Updates, server: Any) -> tuple[Tensor, Any]:
        seen = server.seen.clone()
        seen[list(sent.clients)] += sent.round
        mean = self.average(sent.numbers, sent.weights)
        scale = torch.arange(self.clients).to(mean).unsqueeze(1)
        return scale * mean, Memory(seen, (mean.sum().unsqueeze(0),))
