"""Bad clients: who is left out of a round because its loss is no number or its update explodes, and how many may be.

A client that is left out is as one that did not take part: it keeps the state that it began the round with, its update
is in no average, and it receives the average like everybody. Only its batches move on, so that a bad row costs the
rounds that it is drawn in and not the rest of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from pf2lora.core.method import State, over_tensors
from pf2lora.errors import UserError

# An update explodes that is this many times the largest that its client and the median client ever made, and this many
# times what the client's adapters were before it. AdamW moves a number by about its rate in a step, whatever the
# gradient, and SGD's updates grow by tens over a run (from B = 0): a thousandfold is no honest one. The second limit
# is for a client that hardly moved so far (its rows were fitted already) and now has something to learn.
GROWTH, OWN_SIZE = 1000.0, 10.0
REMEDY = "a smaller lr or client_lr usually helps"


class Diverged(UserError):
    """More clients of a round are bad than may be: there is nothing left to go on with. `federation` is the position of
    the one whose clients they are, where several are trained side by side."""

    federation = 0


class Change(NamedTuple):
    """How far learners moved in a round, `moved (M,)`, and how large their adapters were before, `size (M,)`."""

    moved: Tensor
    size: Tensor


def change(before: State, after: State) -> Change:
    """The Euclidean norms over x and y of every learner's update, and of what it began with; on the host."""

    def norm(x: Tensor, y: Tensor) -> Tensor:
        return torch.hypot(torch.linalg.vector_norm(x, dim=1), torch.linalg.vector_norm(y, dim=1))

    found = torch.stack([norm(after.x - before.x, after.y - before.y), norm(before.x, before.y)])
    return Change(*found.double().cpu())


def lost(before: State, after: State) -> Tensor:
    """Which learners' x, y, or what is kept for each number of them, was finite before and is no longer `(M,)`. A
    step's loss is taken before it moves, so a last step to where no numbers are shows here alone; and where AdamW's
    moments have overflowed, x would stand still for good. A single figure that a method keeps may be undefined."""
    widths = before.x.shape[1], before.y.shape[1]
    found: list[Tensor] = []

    def look(old: Tensor, new: Tensor) -> Tensor:
        if old[0].numel() in widths:
            found.append((torch.isfinite(old) & ~torch.isfinite(new)).flatten(1).any(1))
        return new

    over_tensors(look, before, after)
    return torch.stack(found).any(0)


class UpdateLedger:
    """The largest update that every learner ever made, by which its next one is judged.

    Learners are those of several federations of `clients` each, which know nothing of each other. `largest` is all
    that has to be kept between rounds; 0 where a learner has not moved yet. Without `compare` (where nobody may look
    at the others' norms) a learner is judged by its own updates alone. Where several processes share the learners,
    `numbers` says what those that are judged here are called among all.
    """

    def __init__(
        self,
        learners: int,
        clients: int | None = None,
        *,
        compare: bool = True,
        largest: Sequence[float] = (),
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.numbers = range(learners) if numbers is None else numbers
        self.clients, self.compare = clients or learners, compare
        self.largest = list(largest) or [0.0] * learners
        self.now: dict[int, tuple[float, float]] = {}  # this round's updates so far: moved, size

    def judge(self, learners: Sequence[int], losses: Tensor, made: Change) -> dict[int, str]:
        """Who of `learners` is bad, and why, after a round's local steps with these losses `(steps, M)`: whose loss is
        no number, or whose update explodes against those of earlier rounds. The others' updates are noted."""
        bad: dict[int, str] = {}
        losses, usual = losses.cpu(), self.usual([self.numbers[i] for i in learners])
        for column, (i, moved, size) in enumerate(zip(learners, made.moved.tolist(), made.size.tolist())):
            not_finite = (~torch.isfinite(losses[:, column])).nonzero()
            if len(not_finite):
                step = int(not_finite[0])
                bad[i] = f"its loss became {losses[step, column].item():g} in local step {step + 1}"
            elif not math.isfinite(moved):
                bad[i] = "its update is too large for a number"
            elif why := exploded(moved, size, usual[column]):
                bad[i] = why
            else:
                self.now[self.numbers[i]] = moved, size
        return bad

    def close(self) -> dict[int, str]:
        """The end of a round. In a federation's first one there are no earlier updates: its learners are judged by the
        median of this one's, and who is bad is told. The others' updates are remembered."""
        bad: dict[int, str] = {}
        for first in range(0, len(self.largest), self.clients) if self.compare else ():
            own = [i for i in range(first, first + self.clients) if i in self.now]
            if own and not any(self.largest[first : first + self.clients]):
                usual = GROWTH * median_low([self.now[i][0] for i in own])
                bad |= {i: why for i in own if (why := exploded(*self.now[i], usual))}
        for i, (moved, _) in self.now.items():
            if i not in bad:
                self.largest[i] = max(self.largest[i], moved)
        self.now = {}
        return bad

    def usual(self, learners: Sequence[int]) -> list[float]:
        """What an update of each learner's may be, by those of earlier rounds; infinite where there are none."""
        medians: dict[int, float] = {}
        found = []
        for i in learners:
            first = i - i % self.clients
            if self.compare and first not in medians:
                known = [v for v in self.largest[first : first + self.clients] if v]
                medians[first] = median_low(known) if known else 0.0
            most = max(self.largest[i], medians.get(first, 0.0))
            found.append(GROWTH * most if most else math.inf)
        return found


def exploded(moved: float, size: float, usual: float) -> str:
    """Why an update explodes; empty where it does not."""
    if moved <= max(usual, OWN_SIZE * size):
        return ""
    return f"its update's norm {moved:.3g} is more than {GROWTH:g} times what was seen before"


def check_enough(
    bad: Mapping[int, str],
    federations: Sequence[Sequence[int]],
    names: Sequence[str],
    number: int,
    most: int | None,
) -> None:
    """`Diverged` where more of a federation's participants are bad than `most` (None: half of them), or all are."""
    for position, federation in enumerate(federations):
        found = [i for i in federation if i in bad]
        allowed = len(federation) // 2 if most is None else most
        if found and (len(found) > allowed or len(found) == len(federation)):
            rest = f", and {len(found) - 1} more of {len(federation)} clients" if len(found) > 1 else ""
            error = Diverged(
                f"client {names[found[0]]!r} is bad in round {number}: {bad[found[0]]}{rest}; {REMEDY}"
            )
            error.federation = position
            raise error


def without(federations: Sequence[Sequence[int]], bad: Mapping[int, str]) -> Iterator[list[int]]:
    """The federations' participants that are in the average."""
    return ([i for i in federation if i not in bad] for federation in federations)
