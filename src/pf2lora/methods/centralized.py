"""Centralized LoRA: one learner on everybody's data. What federating gives up, and a bound that is no federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pf2lora.methods.homlora import HomLoRA


@dataclass(frozen=True)
class Centralized(HomLoRA):
    """HOMLoRA with a single client that holds the pooled data; measured on each client's test data.

    With `same_examples` a batch is as large as those of all clients of a round together, so that as many steps see as
    many examples as a federated run does; without, it is as large as one client's, and sees 1/M of them.
    """

    same_examples: bool = True

    name: ClassVar[str] = "centralized"
    label: ClassVar[str] = "Centralized LoRA"
    summary: ClassVar[str] = "one learner on everybody's data: what federating gives up"
    sent_part: ClassVar[str] = "the data"
    pooled: ClassVar[bool] = True
    federated: ClassVar[bool] = False

    def batch_size(self, size: int, learners: int) -> int:
        return size * learners if self.same_examples else size
