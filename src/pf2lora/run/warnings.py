"""What a user should look at in a finished run: a loss above its start, client adapters that do not move, clients that
were left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pf2lora.core.method import Method
from pf2lora.run.result import RoundRecord

HARDLY = 1e-5  # a relative change of y over a round below this counts as not moving
PLAIN = 0.25  # a rise by this share of its start is no accident
ONE_ROUND = 0.1  # what the losses of one short round may differ by from another's, of its start
NOISE = 0.02, 0.01  # a loss has not risen that did by less than this share of its start, or by less than this


class Moving:
    """Whether client adapters still move."""

    def __init__(self, personal: Tensor) -> None:
        self.previous = personal.clone()
        self.still = [False] * len(personal)

    def look(self, personal: Tensor, participants: Sequence[int]) -> None:
        personal = personal.cpu()
        change = (personal - self.previous).norm(dim=1) / self.previous.norm(dim=1).clamp_min(1e-30)
        for k in participants:
            self.still[k] = bool(change[k] < HARDLY)
        self.previous.copy_(personal)


def has_a_rate(method: Method, client_rank: int) -> bool:
    """Whether a client's own adapter moves by a rate that the user gave: one that finds its own size may well stay
    at none."""
    return "client_lr" in method.parameters() and not method.resizes and client_rank > 0


def risen(losses: Sequence[float]) -> tuple[float, float] | None:
    """The loss of the first round and the mean of the last third of them, where it rose visibly: by more than a little,
    and by more than twice the standard error of that difference, where several rounds tell how much they differ (which
    excuses no rise that is plain); where one round is all there is to tell, by more than a tenth."""
    last = losses[-(len(losses) // 3 or 1) :]
    start, end = losses[0], statistics.fmean(last)
    share, least = NOISE
    noise = max(share * abs(start), least)
    if len(last) > 1:
        error = math.sqrt(statistics.variance(last) * (1 + 1 / len(last)))
        noise = max(noise, min(2 * error, PLAIN * abs(start)))
    else:
        noise = max(noise, ONE_ROUND * abs(start))
    return (start, end) if len(losses) > 1 and end - start > noise else None


def training_warnings(
    names: Sequence[str], rounds: Sequence[RoundRecord], still: Sequence[bool], *, client_lr: bool
) -> list[str]:
    """What a user should look at: a loss above its start, client adapters that do not move. `client_lr` says whether
    the user has such a rate to change."""
    found = []
    for k, name in enumerate(names):
        losses = [loss for r in rounds if (loss := r.train_loss[k]) is not None]
        if losses and (rise := risen(losses)):
            found.append(
                f"client {name!r}: the training loss rose above its start ({rise[0]:.3f} → {rise[1]:.3f}); "
                f"a smaller lr{' or client_lr' if client_lr else ''} may help"
            )
        if still and still[k]:
            found.append(
                f"client {name!r}: its own adapter has stopped moving (less than {HARDLY:g} of its size in the last "
                f"round); a larger client_lr may help"
            )
    return found


class LeftOut(NamedTuple):
    """How often a client was left out as a bad one, and the first time."""

    times: int
    round: int
    reason: str


def left_out_warnings(found: Mapping[str, LeftOut], rounds: int) -> list[str]:
    """A line for each client that was left out of some of the run's rounds."""
    return [
        f"client {name!r} was left out of {of.times} of {rounds} rounds, first of round {of.round}: {of.reason}"
        for name, of in found.items()
    ]
