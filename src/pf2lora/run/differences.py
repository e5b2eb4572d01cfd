"""When one score is better than another: by more than other test rows or other seeds would change it.

A score has two accidents: which rows it was tested on (the bootstrap, in pairs: core/resampling.py) and which seeds it
was trained with. Their variances add up. Without either nobody can tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pf2lora.core.resampling import TIMES

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Resampled:
    """What the choice of test rows leaves open of the headline score: each client's standard error, and the mean over
    clients in each of the resamplings, which take the same rows for every method."""

    per_client: list[float]
    means: list[float]


@dataclass(frozen=True)
class Uncertain:
    """A figure with its standard error (None: unknown) and how many free values that error rests on."""

    mean: float
    error: float | None
    freedom: float = math.inf

    @property
    def margin(self) -> float | None:
        """Half the width of its 95% interval (Student's, for errors that rest on a few seeds)."""
        if self.error is None:
            return None
        from scipy.stats import t

        return float(t.ppf(0.5 + CONFIDENCE / 2, max(self.freedom, 1.0))) * self.error

    @property
    def is_nought(self) -> bool | None:
        """Whether it cannot be told from 0; None where its error is unknown."""
        margin = self.margin
        # Rounding must not turn two equal scores into different ones.
        return None if margin is None else abs(self.mean) <= margin + 1e-12


def row_margin(error: float) -> float:
    """Half the width of the 95% interval of a score with that standard error over its test rows."""
    return Uncertain(0.0, error, TIMES - 1).margin or 0.0


def over_seeds_and_rows(values: Sequence[float], resampled: Sequence[Sequence[float]] | None) -> Uncertain:
    """The mean of a figure over seeds; `resampled` has, for each seed, the same figure on resampled test rows."""
    mean = statistics.fmean(values)
    parts: list[tuple[float, int]] = []  # variances, each with the values it rests on less one
    if len(values) > 1:
        parts.append((statistics.variance(values) / len(values), len(values) - 1))
    if resampled:
        means = [statistics.fmean(same) for same in zip(*resampled)]
        parts.append((statistics.variance(means), len(means) - 1))
    return combined(mean, parts)


def combined(mean: float, parts: Sequence[tuple[float, int]]) -> Uncertain:
    """Variances of independent accidents add up; their free values as Welch and Satterthwaite have it."""
    if not parts:
        return Uncertain(mean, None)
    total = sum(variance for variance, _ in parts)
    spread = sum(variance**2 / freedom for variance, freedom in parts)
    return Uncertain(mean, math.sqrt(total), total**2 / spread if spread else math.inf)


def of_errors(
    values: Sequence[float],
    errors: Sequence[float | None],
    others: Sequence[float],
    of_others: Sequence[float | None],
) -> Uncertain:
    """The difference of one client's scores under two methods, seed by seed; the errors are of its test rows, which
    both share: taken as independent they are too large rather than too small."""
    differences = [a - b for a, b in zip(values, others)]
    parts: list[tuple[float, int]] = []
    if len(differences) > 1:
        parts.append((statistics.variance(differences) / len(differences), len(differences) - 1))
    known = [e for e in (*errors, *of_others) if e is not None]
    if len(known) == len(errors) + len(of_others) and known:
        # The same rows in every seed: their accident does not average out.
        parts.append((statistics.fmean(e**2 for e in known) * 2, TIMES - 1))
    return combined(statistics.fmean(differences), parts)
