"""FedSA-LoRA (Guo et al., *Selective Aggregation for Low-Rank Adaptation in Federated Learning*, ICLR 2025).

`W_k = W_0 + s·B_k A`: clients train both factors and send A alone. A learns what is general, B_k what is the client's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pf2lora.core.layout import Layout
from pf2lora.methods.homlora import HomLoRA


@dataclass(frozen=True)
class FedSALoRA(HomLoRA):
    """`A ← Σ_k w_k A_k`; B_k and a trained head never leave. What all clients share is A with B = 0, where all began:
    it changes nothing in the base model until a client puts its own B_k before it."""

    name: ClassVar[str] = "fedsa-lora"
    label: ClassVar[str] = "FedSA-LoRA"
    summary: ClassVar[str] = "clients train A and B, send and average A alone"
    sent_part: ClassVar[str] = "A"
    personal_part: ClassVar[str] = "B and the head"

    @classmethod
    def head_placement(cls, head: str) -> str:
        """A head that is trained is a client's own, as its B."""
        return "personal" if head == "shared" else head

    def leaves(self, number: int) -> Layout:
        return self.layout.shared_kinds("A")
