"""Figures over seeds, and when two of them differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A figure over seeds: its mean and its sample deviation, which one seed alone does not have."""

    mean: float
    deviation: float | None
    count: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean and sample deviation over seeds; None where a seed has none (it does not drop out of a mean)."""
    known = list(values)
    finite = [v for v in known if v is not None and math.isfinite(v)]
    if not finite or len(finite) < len(known):
        return None
    deviation = statistics.stdev(finite) if len(finite) > 1 else None
    return Estimate(statistics.fmean(finite), deviation, len(finite))


def within_spread(a: Estimate, b: Estimate) -> bool | None:
    """Whether two means differ by no more than their seeds do: |a − b| ≤ √(σ_a² + σ_b²).

    None where either has one seed only: then nobody can tell.
    """
    if a.deviation is None or b.deviation is None:
        return None
    # Rounding must not turn two equal means into different ones.
    return abs(a.mean - b.mean) <= math.hypot(a.deviation, b.deviation) + 1e-12
