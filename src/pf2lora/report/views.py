"""What the page shows, computed from results: the tables, and the plain data its charts draw from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pf2lora.methods import group_of
from pf2lora.run import numbers
from pf2lora.run.estimates import Estimate, estimate, within_spread
from pf2lora.run.result import Point, Result, SeedRun
from pf2lora.run.verdicts import difference, uncertain
from pf2lora.tasks.settings import Metric

COLORS = 8  # --c0 … --c7 in report.css
LABELS = 7  # labels drawn on their own; the rest of a long list is summed as "other"


@dataclass(frozen=True)
class Series:
    """One method of one run: a row of the tables, a line of the charts."""

    result: Result
    method: str
    run: str  # the run's name; empty where the page shows one run only
    color: int
    dash: int

    @property
    def name(self) -> str:
        return self.result.methods[self.method].label

    @property
    def label(self) -> str:
        return f"{self.name} · {self.run}" if self.run else self.name

    @property
    def seeds(self) -> list[SeedRun]:
        return self.result.methods[self.method].runs

    def cost(self, *path: str) -> Estimate | None:
        """A cost over the seeds, such as `seconds` or `bytes_per_round`, `adapter`."""
        return estimate(_follow(run, path) for run in self.seeds)


def _follow(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = getattr(value, name)
    return value


def all_series(runs: list[Result], names: list[str]) -> list[Series]:
    """Every method of every run that has anything to show. A method keeps its colour from run to run; the dashes tell
    runs apart."""
    methods = list(dict.fromkeys(method for result in runs for method in result.methods))
    return [
        Series(
            result,
            method,
            name if len(runs) > 1 else "",
            methods.index(method) % COLORS,
            i + methods.index(method) // COLORS,
        )
        for i, (result, name) in enumerate(zip(runs, names))
        for method in result.methods
        if result.methods[method].runs
    ]


def failed(runs: list[Result], names: list[str]) -> list[str]:
    """A line for each method that failed."""
    return [
        f"{result.methods[method].label}{f' · {name}' if len(runs) > 1 else ''} failed: {why}"
        for result, name in zip(runs, names)
        for method, why in result.failed.items()
    ]


def grouped(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """A table's rows under headings where there are more methods than colours; else all of them under none."""
    if len({row["series"].method for row in rows}) <= COLORS:
        return [("", rows)]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(group_of(row["series"].method), []).append(row)
    return list(groups.items())


@dataclass(frozen=True)
class Cell:
    """A score with its deviation, and how it stands against the best of its column."""

    value: str
    deviation: str
    mark: str  # "best", "tied" or empty
    gap: str  # the difference from the best


EMPTY = Cell("–", "", "", "")


Tied = Callable[[int, int], bool | None]
"""Whether two rows of a column cannot be told apart; None where nobody can say."""


def ranked(estimates: list[Estimate | None], metric: Metric, tied: Tied | None = None) -> list[Cell]:
    """A column of scores, the best marked, and with it those that cannot be told from it: by the spread over seeds,
    unless `tied` knows better."""
    known = [e for e in estimates if e is not None]
    if not known:
        return [EMPTY] * len(estimates)
    pick = max if metric.higher_is_better else min
    best = pick(known, key=lambda e: e.mean)
    first = estimates.index(best)

    def close(i: int, e: Estimate) -> bool:
        return bool(within_spread(e, best) if tied is None else tied(i, first))

    return [
        EMPTY if e is None else _cell(e, best, metric, len(known), close(i, e))
        for i, e in enumerate(estimates)
    ]


def _cell(e: Estimate, best: Estimate, metric: Metric, rivals: int, close: bool) -> Cell:
    value = numbers.score(e.mean, metric)
    deviation = "" if e.deviation is None else numbers.score(e.deviation, metric)
    gap = numbers.score(e.mean - best.mean, metric, signed=True)
    if rivals == 1:
        return Cell(value, deviation, "", "")
    if e.mean == best.mean:
        return Cell(value, deviation, "best", "")
    if close:
        return Cell(value, deviation, "tied", gap)
    return Cell(value, deviation, "", gap)


def headline(series: list[Series], metric: str) -> list[dict[str, Any]]:
    """The rows of the headline table. Best is marked among rows that were tested on the same clients."""
    groups = [series] if same_clients([s.result for s in series]) else _by_run(series)
    return [row for group in groups if group for row in _headline_rows(group, metric)]


def _headline_rows(series: list[Series], metric: str) -> list[dict[str, Any]]:
    """Rows whose scores can be ranked against each other."""
    info = series[0].result.metrics[metric]
    point = decisive(series)

    def estimates(point: Point, what: str) -> list[Estimate | None]:
        return [s.result.estimate(s.method, point, metric, what) for s in series]

    def means(point: Point) -> list[Cell]:
        def tied(i: int, j: int) -> bool | None:
            found = difference(series[i].result, series[i].method, series[j].method, point)
            return None if found is None else found.is_nought

        one_run = metric == series[0].result.metric and len({id(s.result) for s in series}) == 1
        return ranked(estimates(point, "mean"), info, tied if one_run else None)

    columns = zip(
        series,
        means("served"),
        means("before_averaging"),
        means("deploy"),
        ranked(estimates(point, "worst"), info),
        estimates(point, "spread"),
    )
    return [
        {
            "series": s,
            "served": served,
            "before": before,
            "deploy": deploy,
            "worst": worst,
            "spread": numbers.score(total(spread), info),
            "interval": interval(s, metric, point),
            "parameters": numbers.count(
                total(s.cost("parameters", "common"), s.cost("parameters", "client"))
            ),
            "bytes": numbers.size(total(s.cost("bytes_per_round", "total"))),
            "seconds": numbers.duration(total(s.cost("seconds"))),
        }
        for s, served, before, deploy, worst, spread in columns
    ]


def interval(s: Series, metric: str, point: Point) -> str:
    """Between which scores the mean lies, over other test rows and seeds; empty where nobody can say."""
    found = uncertain(s.result, s.method, point) if metric == s.result.metric else None
    if found is None or found.margin is None:
        return ""
    low, high = (
        numbers.score(found.mean + sign * found.margin, s.result.metrics[metric]) for sign in (-1, 1)
    )
    return f"{low} to {high}"


def decisive(series: list[Series]) -> Point:
    """What methods are compared by: what clients deploy, where all of them chose it."""
    return "deploy" if all(s.result.point == "deploy" for s in series) else "served"


def _by_run(series: list[Series]) -> list[list[Series]]:
    return [[s for s in series if s.run == run] for run in dict.fromkeys(s.run for s in series)]


def total(*parts: Estimate | None) -> float | None:
    """The sum of the parts' means; None where a part is unknown."""
    known = [p.mean for p in parts if p is not None]
    return sum(known) if len(known) == len(parts) else None


def costs(series: list[Series]) -> list[dict[str, Any]]:
    """The rows of the cost table: each figure as text, and as a share of the column's largest for its bar."""
    figures = {
        "common": (numbers.count, [total(s.cost("parameters", "common")) for s in series]),
        "client": (numbers.count, [total(s.cost("parameters", "client")) for s in series]),
        "head": (numbers.count, [total(s.cost("parameters", "head")) for s in series]),
        "adapter_bytes": (numbers.size, [total(s.cost("bytes_per_round", "adapter")) for s in series]),
        "all_bytes": (numbers.size, [total(s.cost("bytes_per_round", "total")) for s in series]),
        "flops": (numbers.flops, [total(s.cost("flops_per_round")) for s in series]),
        "seconds": (numbers.duration, [total(s.cost("seconds")) for s in series]),
        "evaluation": (numbers.duration, [total(s.cost("evaluation_seconds")) for s in series]),
        "memory": (numbers.size, [total(s.cost("peak_memory_bytes")) for s in series]),
    }
    rows: list[dict[str, Any]] = [{"series": s, "cells": []} for s in series]
    for text, values in figures.values():
        largest = max((v for v in values if v is not None), default=0) or 1
        for row, value in zip(rows, values):
            row["cells"].append({"text": text(value), "share": round((value or 0) / largest, 4)})
    return rows


def client_data(result: Result) -> dict[str, Any]:
    """Each client's rows by label, the most frequent labels first, the rest summed as "other"."""
    totals: dict[str, int] = {}
    for client in result.clients:
        for label, size in client.labels.items():
            totals[label] = totals.get(label, 0) + size
    by_size = sorted(totals, key=lambda label: -totals[label])
    # A long list is cut; a list that just fits is not cut for the sake of one label.
    named = by_size if len(by_size) <= LABELS + 1 else by_size[:LABELS]
    shown = [label for label in totals if label in named]
    largest = max(client.train for client in result.clients) or 1
    rows = []
    for client in result.clients:
        parts = [(label, client.labels.get(label, 0)) for label in shown]
        if len(named) < len(by_size):
            parts.append(("other", sum(client.labels.values()) - sum(size for _, size in parts)))
        total = sum(size for _, size in parts)
        described = [f"{label}: {size} ({size / total:.0%})" for label, size in parts if size]
        chosen_by = f", {client.validation} to choose by" if client.validation else ""
        sizes = f"{client.train} rows to train on{chosen_by}, {client.test} to test on"
        rows.append(
            {
                "client": client,
                "size": round(client.train / largest, 4),
                "parts": [
                    {"color": i % COLORS, "rows": size, "share": round(size / total, 4) if total else 0}
                    for i, (_, size) in enumerate(parts)
                ],
                "text": f"{client.name}: " + ", ".join([sizes, *described]),
                "tip": "\n".join([client.name, sizes, *described]),
            }
        )
    other = [f"other ({len(by_size) - len(named)})"] if len(named) < len(by_size) else []
    return {"labels": shown + other, "rows": rows}


def warnings(series: list[Series]) -> list[dict[str, Any]]:
    """Every warning once, with the methods and seeds that gave it."""
    found: dict[str, list[str]] = {}
    for s in series:
        for run in s.seeds:
            for text in run.warnings:
                found.setdefault(text, []).append(f"{s.label}, seed {run.seed}")
    return [{"text": text, "sources": sources} for text, sources in found.items()]


def machine(result: Result) -> dict[str, str]:
    """What it ran on, sizes as people read them."""
    return {
        key.removesuffix("_bytes"): numbers.size(value) if key.endswith("_bytes") else str(value)
        for key, value in result.machine.items()
    }


def same_clients(runs: list[Result]) -> bool:
    """Whether the runs have the same clients, so that their scores are measured on the same rows."""
    return all(r.clients == runs[0].clients for r in runs)


def parts_present(runs: list[Result]) -> dict[str, bool]:
    """Which sections have something to show."""
    seeds = [seed for result in runs for method in result.methods.values() for seed in method.runs]
    rounds = [entry for seed in seeds for entry in seed.rounds]
    return {
        "scores": bool(seeds),
        "clients": bool(seeds) and same_clients(runs),
        "tradeoff": same_clients(runs) and sum(bool(m.runs) for r in runs for m in r.methods.values()) > 2,
        "deploy": any(seed.choices for seed in seeds),
        "validation": any(client.validation for result in runs for client in result.clients),
        "ranks": any(entry.ranks for entry in rounds),
        "shares": any(entry.client_share or entry.second_order_share for entry in rounds),
        "errors": len(runs) == 1 and any(seed.confusion for seed in seeds),
        "newcomers": len(runs) == 1 and bool(runs[0].newcomers),
        "examples": len(runs) == 1 and bool(runs[0].examples),
    }


def seed_counts(series: list[Series]) -> str:
    """`3`, or `1 to 3` where methods have different numbers of seeds."""
    counts = sorted({len(s.seeds) for s in series})
    if not counts:
        return "none"
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
