"""The synthetic experiment over its seeds: median and quartiles, and how each method ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pf2lora.errors import UserError
from pf2lora.reproduce.comparison import Curves, SeedRun
from pf2lora.reproduce.synthetic import CLIENTS, Settings
from pf2lora.reproduce.tuning import Tuning


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles over the seeds, of whatever shape one seed's values have."""

    median: list[Any]
    q1: list[Any]
    q3: list[Any]


@dataclass(frozen=True)
class Ending:
    """The last round, per client: every metric and ‖Ŵ_k − W*_k‖ / ‖W*_k‖, and in how many seeds the rank was W*_k's.

    `diverged` seeds count as wrong ranks; quartiles are of the others.
    """

    metrics: dict[str, Quartiles]
    rank_right: list[int]
    diverged: int


@dataclass(frozen=True)
class OptimumSpread:
    """The reduced-rank regression of each client, over the seeds."""

    rank_limit: list[int]
    metrics: dict[str, Quartiles]


@dataclass(frozen=True)
class Summary:
    """`synthetic.json`. Curves and endings: method -> "paper", "tuned" -> measuring point."""

    experiment: str
    settings: Settings
    tuning: dict[str, Tuning]  # empty where nothing was tuned
    clients: list[str]
    seeds: list[int]
    steps: list[int]
    curves: dict[str, dict[str, dict[str, dict[str, Quartiles]]]]
    optimum: dict[str, OptimumSpread]
    final: dict[str, dict[str, dict[str, Ending]]]
    runs: list[SeedRun]


def quartiles(values: Sequence[Any]) -> Quartiles:
    """Over the first axis, the seeds."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75), axis=0)
    return Quartiles(middle.tolist(), low.tolist(), high.tolist())


def summarize(runs: list[SeedRun], settings: Settings, tuning: dict[str, Tuning]) -> Summary:
    """All seeds together."""
    curves: dict[str, dict[str, dict[str, dict[str, Quartiles]]]] = {}
    final: dict[str, dict[str, dict[str, Ending]]] = {}
    for method, plans in runs[0].curves.items():
        curves[method], final[method] = {}, {}
        for rates, points in plans.items():
            found = {point: finished(runs, method, rates, point) for point in points}
            curves[method][rates] = {
                point: {m: quartiles([c[m] for _, c in pairs]) for m in pairs[0][1]}
                for point, pairs in found.items()
            }
            final[method][rates] = {point: ending(pairs, len(runs)) for point, pairs in found.items()}
    return Summary(
        experiment="synthetic",
        settings=settings,
        tuning=tuning,
        clients=list(CLIENTS),
        seeds=[run.seed for run in runs],
        steps=[settings.local_steps * i for i in range(settings.rounds + 1)],
        curves=curves,
        optimum={kind: spread(runs, kind) for kind in runs[0].optimum},
        final=final,
        runs=runs,
    )


def finished(runs: list[SeedRun], method: str, rates: str, point: str) -> list[tuple[SeedRun, Curves]]:
    """The seeds whose training did not diverge, with their curves."""
    pairs = [(run, run.curves[method][rates][point]) for run in runs]
    kept = [(run, curves) for run, curves in pairs if curves is not None]
    if not kept:
        raise UserError(f"{method} diverged in every seed with the rates called {rates!r}")
    return kept


def ending(pairs: list[tuple[SeedRun, Curves]], seeds: int) -> Ending:
    """How a method ended in the seeds that did not diverge, of `seeds` in all."""
    last = [{m: rows[-1] for m, rows in curves.items()} for _, curves in pairs]
    metrics = {m: quartiles([end[m] for end in last]) for m in last[0]}
    relative = [np.divide(end["distance"], run.truth.norm) for end, (run, _) in zip(last, pairs)]
    right = [np.equal(end["rank"], run.truth.rank_90) for end, (run, _) in zip(last, pairs)]
    return Ending(
        metrics | {"relative_distance": quartiles(relative)},
        np.sum(right, axis=0).tolist(),
        seeds - len(pairs),
    )


def spread(runs: list[SeedRun], kind: str) -> OptimumSpread:
    """One kind of optimum over the seeds."""
    optima = [run.optimum[kind] for run in runs]
    metrics = {m: quartiles([best.metrics[m] for best in optima]) for m in optima[0].metrics}
    return OptimumSpread(optima[0].rank_limit, metrics)
