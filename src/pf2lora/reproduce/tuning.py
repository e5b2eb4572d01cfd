"""Every method's rates for the synthetic experiment, chosen in the same way.

Each method gets the same tries: all of its rates times each factor of one grid. A try is scored by its loss on
validation rows, on problems that are not reported; so no figure of the comparison takes part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pf2lora.engines.bad_clients import Diverged
from pf2lora.errors import UserError
from pf2lora.reproduce.synthetic import (
    LEARNERS,
    METHODS,
    Settings,
    make_problem,
    regression_loss,
    validation_rows,
)
from pf2lora.run.result import ROUND_POINTS

# Wide enough that no choice lies at an end: HETLoRA under AdamW goes up to 100.
FACTORS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TUNING_SEEDS = (1000, 1001)  # rates near the edge of divergence pass on one problem and fail on another
TUNING_RUNS = len(METHODS) * len(FACTORS) * len(TUNING_SEEDS)


@dataclass(frozen=True)
class Try:
    """One candidate: a method's rates, and the mean validation loss over clients and seeds at each measuring point.

    No losses where a seed's run diverged: the try has failed.
    """

    factor: float
    rates: dict[str, float]
    validation_loss: dict[str, float] | None


@dataclass(frozen=True)
class Tuning:
    """All tries of one method, and the factor with the lowest validation loss at each measuring point.

    Served and before averaging are two goals: steps that bring a client near its optimum also drive the clients apart,
    which the average then costs. So each has its own choice.
    """

    seeds: list[int]
    tries: list[Try]
    chosen: dict[str, float]


def check_apart(reported: Sequence[int]) -> None:
    """Refuse to report a problem that the rates are tuned on."""
    if both := set(reported) & set(TUNING_SEEDS):
        raise UserError(f"the rates are tuned on seed {min(both)}: report other seeds, or choose --no-tune")


def tune(
    method: str,
    settings: Settings,
    factors: Sequence[float] = FACTORS,
    seeds: Sequence[int] = TUNING_SEEDS,
    advance: Callable[[], None] = lambda: None,
) -> Tuning:
    """Try a method's rates times each of `factors`. `advance` is called after each try on each seed."""
    tries = []
    for factor in factors:
        candidate = settings.scaled(method, factor)
        losses = []
        for seed in seeds:
            losses.append(validation_losses(method, seed, candidate))
            advance()
        tries.append(Try(factor, candidate.rates(method), _mean(losses)))
    return Tuning(list(seeds), tries, {point: _best(tries, point) for point in ROUND_POINTS})


def tune_all(settings: Settings, advance: Callable[[], None] = lambda: None) -> dict[str, Tuning]:
    """Every method's tuning; the tries and the seeds are the same for all."""
    return {method: tune(method, settings, advance=advance) for method in METHODS}


def validation_losses(method: str, seed: int, settings: Settings) -> dict[str, float] | None:
    """The clients' mean loss on validation rows after the last round, at each measuring point; None if it diverged."""
    problem = make_problem(seed, settings.noise)
    inputs, targets = validation_rows(seed, problem.truth, settings.noise)
    learner = LEARNERS[method](seed, settings)
    try:
        *_, last = learner.rounds(seed, problem, settings)
    except Diverged:
        return None
    losses: dict[str, float] = {
        point: regression_loss(inputs, targets, learner.weights(state.x, state.y)).mean().item()
        for point, state in zip(ROUND_POINTS, (last.served, last.before))
    }
    return losses if all(map(math.isfinite, losses.values())) else None


def _mean(per_seed: list[dict[str, float] | None]) -> dict[str, float] | None:
    """The mean over seeds; one failed seed fails the try."""
    finite = [losses for losses in per_seed if losses is not None]
    if len(finite) < len(per_seed):
        return None
    return {point: math.fsum(losses[point] for losses in finite) / len(finite) for point in ROUND_POINTS}


def _best(tries: list[Try], point: str) -> float:
    losses = {t.factor: t.validation_loss[point] for t in tries if t.validation_loss is not None}
    if not losses:
        raise UserError("every try of the tuning diverged; --no-tune leaves it out")
    return min(losses, key=losses.__getitem__)
