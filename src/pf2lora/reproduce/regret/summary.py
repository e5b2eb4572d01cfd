"""Regret: a variant's largest distance to the best variant of a task, over the tasks.

Distances are in points: 100 times a score, or a loss in nats. A variant's score on a task is the mean over its clients
and seeds. The distance's spread is the deviation over seeds of the difference to the best variant with the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pf2lora.reproduce.regret.records import Run, Runs
from pf2lora.reproduce.regret.tasks import TASKS, BenchmarkTask
from pf2lora.reproduce.regret.variants import REFERENCE, Variant, variants
from pf2lora.run.estimates import Estimate, estimate
from pf2lora.run.result import OverClients

POINTS = {"deploy": "what each client deploys", "served": "served"}
"""What is summed up, each by itself: a variant's distance is to the best score of the same point."""


@dataclass(frozen=True)
class Cell:
    """A variant on a task, in points: its score, and its distance to the best; and whether its rates lie at an end of
    those tried (`Run.end`)."""

    score: Estimate
    distance: Estimate
    end: str = ""


@dataclass(frozen=True)
class Regret:
    """A variant over the tasks it was run on; `diverged` on so many of them, which have no distance."""

    largest: Estimate
    task: str
    mean: float
    tasks: int
    diverged: int


@dataclass(frozen=True)
class Harm:
    """The client that loses most against training alone, and what it loses in points (below 0: it gains)."""

    client: str
    points: float


@dataclass(frozen=True)
class PointSummary:
    """Everything at one point; `diverged` are (task, variant) without a score, `trivial` what an answer that looks at
    no text has on a task, in points, and `untuned` the variants that are never tuned, with the rates they ran at."""

    cells: dict[str, dict[str, Cell]]  # by task and variant
    best: dict[str, str]
    regret: dict[str, Regret]
    harm: dict[str, dict[str, Harm]]
    diverged: list[tuple[str, str]]
    trivial: dict[str, float]
    untuned: dict[str, list[float]]

    def learned(self, task: str) -> bool:
        """Whether the best variant is better than an answer that looks at no text, where that is known: by more than
        its deviation over seeds."""
        score = self.cells[task][self.best[task]].score
        return task not in self.trivial or score.mean - (score.deviation or 0.0) > self.trivial[task]


def summarize(runs: Runs) -> dict[str, PointSummary]:
    """The summary at each point that the runs have."""
    found = {point: at_point(runs, point) for point in POINTS}
    return {point: summary for point, summary in found.items() if summary.cells}


def at_point(runs: Runs, point: str) -> PointSummary:
    cells: dict[str, dict[str, Cell]] = {}
    best: dict[str, str] = {}
    harm: dict[str, dict[str, Harm]] = {}
    diverged: list[tuple[str, str]] = []
    for task in TASKS.values():
        tables: dict[str, list[OverClients]] = {}
        ends: dict[str, str] = {}
        for variant in variants().values():
            run = runs.get((task.name, variant.run_by(task.has_head)))
            if run is None:
                continue
            found = tables_of(run, task, variant, point)
            if run.diverged or any(table.mean is None for table in found):
                diverged.append((task.name, variant.name))
            elif found:
                tables[variant.name], ends[variant.name] = found, run.end
        if tables:
            cells[task.name], best[task.name] = compared(task, tables, ends)
            clients = next(run.clients for (name, _), run in runs.items() if name == task.name)
            harm[task.name] = harms(task, tables, clients)
    trivial = {task: 100 * run.trivial for (task, _), run in runs.items() if run.trivial is not None}
    known = {task: trivial[task] for task in cells if task in trivial}
    return PointSummary(cells, best, regrets(cells, diverged), harm, diverged, known, untuned(runs))


def untuned(runs: Runs) -> dict[str, list[float]]:
    """The variants that are never tuned, with the rates that they ran at."""
    found: dict[str, set[float]] = {}
    for (_, name), run in runs.items():
        if not variants()[name].tuned:
            found.setdefault(name, set()).add(run.rates["lr"])
    return {name: sorted(rates) for name, rates in found.items()}


def tables_of(run: Run, task: BenchmarkTask, variant: Variant, point: str) -> list[OverClients]:
    """A variant's scores, seed by seed; none where its run has no such point or candidate."""
    found = (
        seed.candidates.get(variant.candidate) if variant.candidate else seed.points.get(point)
        for seed in run.scores
    )
    return [scores[task.metric] for scores in found if scores]


def compared(
    task: BenchmarkTask, tables: Mapping[str, Sequence[OverClients]], ends: Mapping[str, str]
) -> tuple[dict[str, Cell], str]:
    """Every variant beside the best one."""
    points = {name: [100 * (t.mean or 0.0) for t in of_seeds] for name, of_seeds in tables.items()}
    sign = 1.0 if task.higher_is_better else -1.0
    best = max(points, key=lambda name: sign * fmean(points[name]))
    cells = {}
    for name, values in points.items():
        score = estimate(values)
        distance = estimate(sign * (top - value) for top, value in zip(points[best], values))
        assert score and distance
        cells[name] = Cell(score, distance, ends[name])
    return cells, best


def harms(
    task: BenchmarkTask, tables: Mapping[str, Sequence[OverClients]], clients: Sequence[str]
) -> dict[str, Harm]:
    """Every variant's client that loses most against training alone."""
    if REFERENCE not in tables:
        return {}
    sign = 1.0 if task.higher_is_better else -1.0
    alone = by_client(tables[REFERENCE])
    found = {}
    for name, of_seeds in tables.items():
        losses = {
            client: 100 * sign * (own - score)
            for client, own, score in zip(clients, alone, by_client(of_seeds))
            if own is not None and score is not None
        }
        if losses:
            worst = max(losses, key=losses.__getitem__)
            found[name] = Harm(worst, losses[worst])
    return found


def by_client(tables: Sequence[OverClients]) -> list[float | None]:
    """Each client's mean over seeds; None where it is undefined."""
    means = (estimate(values) for values in zip(*(table.per_client for table in tables)))
    return [mean.mean if mean else None for mean in means]


def regrets(
    cells: Mapping[str, Mapping[str, Cell]], diverged: Sequence[tuple[str, str]]
) -> dict[str, Regret]:
    """In the order of the benchmark."""
    found = {}
    for name in variants():
        distances = {task: of_task[name].distance for task, of_task in cells.items() if name in of_task}
        if distances:
            task = max(distances, key=lambda task: distances[task].mean)
            found[name] = Regret(
                distances[task],
                task,
                fmean(distance.mean for distance in distances.values()),
                len(distances),
                sum(variant == name for _, variant in diverged),
            )
    return found
