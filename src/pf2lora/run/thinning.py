"""How much of a long run result.json keeps: so many rounds that it stays readable. metrics.jsonl has every round.

A round holds a few numbers for each client. Where rounds × clients are too many, rounds are passed over evenly, those
that were measured and the others apart; the first and the last stay. What is dropped is dropped while the run goes on,
so that its memory does not grow with its rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pf2lora.run.result import RoundRecord

MOST_NUMBERS = (
    100_000  # of one kind (a loss, a score) in a run: rounds × clients. 200 clients keep 500 rounds
)
LEAST_ROUNDS = 20  # kept whatever the clients are


def most_rounds(clients: int) -> int:
    """How many rounds of a run with so many clients are kept at most."""
    return max(LEAST_ROUNDS, MOST_NUMBERS // clients)


def thinned(rounds: list[RoundRecord], clients: int) -> list[RoundRecord]:
    """The rounds so far, as many as are kept: at least a quarter of `most_rounds`, up to all of it. It depends on these
    alone, so that a run that is resumed keeps the same ones."""
    most = most_rounds(clients)
    if len(rounds) <= most:
        return rounds
    measured = every_other([r for r in rounds if r.served is not None], most // 4)
    plain = every_other([r for r in rounds if r.served is None], most // 4)
    kept = {r.round: r for r in (rounds[0], *measured, *plain, rounds[-1])}
    return [kept[number] for number in sorted(kept)]


def every_other(rounds: Sequence[RoundRecord], most: int) -> Sequence[RoundRecord]:
    """At most so many of the rounds, evenly: every other one, or every fourth, eighth, … From longer runs the same ones
    are dropped, and more."""
    if len(rounds) <= most:
        return rounds
    first, last = rounds[0].round, rounds[-1].round
    stride = min(b.round - a.round for a, b in pairwise(rounds))
    while (last - first) // stride >= most:
        stride *= 2
    return [r for r in rounds if (r.round - first) % stride == 0]
