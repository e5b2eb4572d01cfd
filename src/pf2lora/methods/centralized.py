"""Centralized LoRA: one learner on everybody's data. What federating gives up, and a bound that is no federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pf2lora.methods.homlora import HomLoRA


@dataclass(frozen=True)
class Centralized(HomLoRA):
    """HOMLoRA with a single client that holds the pooled data; measured on each client's test data."""

    name: ClassVar[str] = "centralized"
    label: ClassVar[str] = "Centralized LoRA"
    pooled: ClassVar[bool] = True
    federated: ClassVar[bool] = False
