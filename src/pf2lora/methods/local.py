"""Local: every client alone. The floor that tells whether federating helps at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pf2lora.methods.homlora import HomLoRA


@dataclass(frozen=True)
class Local(HomLoRA):
    """HOMLoRA's steps with nothing sent and nothing received."""

    name: ClassVar[str] = "local"
    label: ClassVar[str] = "Local"
    summary: ClassVar[str] = "every client alone: the floor that tells whether federating helps"
    sent_part: ClassVar[str] = "nothing"
    personal_part: ClassVar[str] = "all of x"
    federated: ClassVar[bool] = False
