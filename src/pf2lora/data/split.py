"""Drawing rows: a client's test part, or a smaller sample, with the shares of its labels kept."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pf2lora.errors import UserError

MINIMUM_ROWS = 4  # fewer cannot be split into something to learn from and something to be measured on
MOST_VALIDATION_ROWS = 500  # more would tell a better choice hardly any better, and cost more to look at
FEW_VALIDATION_ROWS = (
    20  # a choice by fewer is an accident: a small client gives up to a fifth of its rows for them
)

T = TypeVar("T")
Mask = NDArray[np.bool_]


def draw_stratified(keys: Sequence[Hashable], size: int, rng: np.random.Generator) -> Mask:
    """Draw `size` rows, of each key in proportion; of each key one row stays behind as long as it can."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    drawn = np.zeros(len(keys), dtype=bool)
    counts = _proportional([len(group) for group in groups.values()], size)
    for group, count in zip(groups.values(), counts):
        drawn[rng.permutation(group)[:count]] = True
    return drawn


def _proportional(sizes: list[int], total: int) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to `sizes` (largest remainders)."""
    quotas = [size * total / sum(sizes) for size in sizes]
    counts = [min(int(quota), size - 1) for quota, size in zip(quotas, sizes)]

    def turn(i: int) -> tuple[bool, float, int]:  # who leaves one behind comes first, then who lacks most
        return counts[i] >= sizes[i] - 1, counts[i] - quotas[i], i

    queue = [turn(i) for i in range(len(sizes))]
    heapq.heapify(queue)
    for _ in range(total - sum(counts)):
        i = heapq.heappop(queue)[2]
        counts[i] += 1
        if counts[i] < sizes[i]:
            heapq.heappush(queue, turn(i))
    return counts


def split_rows(
    rows: Sequence[T], keys: Sequence[Hashable], test_ratio: float, rng: np.random.Generator
) -> tuple[list[T], list[T]]:
    """(train, test), both in the order of `rows`, at least one row in each. Needs two rows or more."""
    if not 0 < test_ratio < 1:
        raise UserError(f"the test ratio is {test_ratio:g}; it must lie between 0 and 1, like 0.2")
    size = min(max(round(len(rows) * test_ratio), 1), len(rows) - 1)
    return _separate(rows, draw_stratified(keys, size, rng))


def split_validation(
    rows: Sequence[T], keys: Sequence[Hashable], ratio: float, rng: np.random.Generator
) -> tuple[list[T], list[T]]:
    """(train, validation), both in the order of `rows`: at least one row in each, unless there is but one."""
    if not 0 <= ratio < 1:
        raise UserError(f"the validation ratio is {ratio:g}; it must be 0 (none) or below 1, like 0.1")
    if ratio == 0 or len(rows) < 2:
        return list(rows), []
    enough = min(FEW_VALIDATION_ROWS, len(rows) // 5)
    size = min(max(round(len(rows) * ratio), enough, 1), len(rows) - 1, MOST_VALIDATION_ROWS)
    return _separate(rows, draw_stratified(keys, size, rng))


def subsample(rows: Sequence[T], keys: Sequence[Hashable], limit: int, rng: np.random.Generator) -> list[T]:
    """At most `limit` of the rows, in their order; a key vanishes only if there are more keys than rows."""
    if limit < 1:
        raise UserError(f"the limit is {limit}; it must be 1 or more")
    kept, _ = _separate(rows, draw_stratified(keys, max(len(rows) - limit, 0), rng))
    return kept


def _separate(rows: Sequence[T], drawn: Mask) -> tuple[list[T], list[T]]:
    left = [row for row, out in zip(rows, drawn) if not out]
    return left, [row for row, out in zip(rows, drawn) if out]
