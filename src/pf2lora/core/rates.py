"""The rate of a run where none is given, and how rates change with its local steps: a warm-up, then constant, linear or
cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pf2lora.errors import UserError, unknown

if TYPE_CHECKING:
    from pf2lora.core.layout import Layout  # which takes torch, and a config does without

RATE_SCHEDULES = ("constant", "linear", "cosine")

AUTO: Literal["auto"] = "auto"
GivenRate = float | Literal["auto"]
RATE, WIDTH = 3e-3, 768  # what is best, or near it, on models of 384 to 768 (docs/rates.md)
TEXT_RATE = 9e-3  # the same where text is learned to be written
CLIENTS = 8  # whose mean was taken where these were found


def rate_in_numbers(given: GivenRate, layout: Layout, rate: float = RATE) -> float:
    """A rate of AdamW on the common adapter, as a number. `auto` is η = `rate` · min(1, 768 / n), with the task's rate
    and n the smallest input of the adapted layers: AdamW moves every number of A by about η, and so A's product with an
    input of n numbers by up to n · η."""
    if given != AUTO:
        return given
    widths = [entry.shape[1] for entry in layout.entries if entry.kind == "A"]
    return rate * (WIDTH / max(WIDTH, min(widths, default=WIDTH)))


def alone_factor(clients: int = CLIENTS) -> float:
    """What a rate that is good for the mean of so many clients is multiplied by where a client steps alone: 1/√K. The
    mean of K has 1/√K of the noise of one of them, which nobody takes out of a client's own steps. More than 8 count
    as 8: the rates themselves do not follow K, and smaller factors have not been measured."""
    return 1 / math.sqrt(min(clients, CLIENTS))


@dataclass(frozen=True)
class RateSchedule:
    """Of a run's T local steps, t = 0 … T − 1, the first W = ⌈`warmup` · T⌉ multiply the rates by (t + 1) / W, and the
    others by 1 (`constant`), 1 − p (`linear`) or (1 + cos πp) / 2 (`cosine`), p = (t − W) / (T − W).

    No step has the rate 0: neither the first, nor the last.
    """

    kind: str = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in RATE_SCHEDULES:
            raise unknown("schedule", self.kind, RATE_SCHEDULES)
        if not 0 <= self.warmup < 1:
            raise UserError(f"warmup is {self.warmup}; it is a share of the run's local steps, in [0, 1)")

    @property
    def is_constant(self) -> bool:
        """Whether every factor is 1."""
        return self.kind == "constant" and self.warmup == 0

    def factor(self, step: int, total: int) -> float:
        """What the rates of local step `step` (from 0) of `total` are multiplied by."""
        rising = math.ceil(self.warmup * total - 1e-9)  # 0.1 · 30 is 3, whatever its last bit
        if step < rising:
            return (step + 1) / rising
        past = (step - rising) / (total - rising)
        if self.kind == "linear":
            return 1 - past
        return (1 + math.cos(math.pi * past)) / 2 if self.kind == "cosine" else 1.0


CONSTANT = RateSchedule()
