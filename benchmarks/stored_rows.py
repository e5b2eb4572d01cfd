"""What is stored in `benchmarks/results`, for the tables and figures of docs/: runs of presets, and of the regret."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from pages import ROOT

from pf2lora.reproduce.regret import records
from pf2lora.reproduce.regret.show import number
from pf2lora.run.estimates import Estimate, estimate

RESULTS = ROOT / "benchmarks" / "results"
POINTS = {"served": "served", "before_averaging": "before averaging", "deploy": "deployed"}
NONE = "–"


class Row(NamedTuple):
    """One method's quantity of one of a preset's runs, over seeds, at the points that are stored."""

    run: str
    label: str
    method: str
    quantity: str
    points: dict[str, Estimate | None]
    paper: float | None


@cache
def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf8"))


def preset_rows(name: str) -> Iterable[Row]:
    """The rows of a page's file, or the seeds of the finished parts of a run that was cut off before it."""
    content = stored(f"tables/{name}")
    if "rows" not in content:
        for run in content["runs"]:
            points = run["per_seed"]
            for quantity in points["served"]:
                found = {point: estimate(scores[quantity]) for point, scores in points.items()}
                yield Row(run["run"], run["run"], run["method"], quantity, found, None)
        return
    labels = {run["name"]: run["label"] for run in content.get("runs", ())}
    for row in content["rows"]:
        found = {p: Estimate(**row[p]) if row[p] else None for p in ("served", "before_averaging")}
        label = labels.get(row["run"], row["run"])
        yield Row(row["run"], label, row["method"], row["quantity"], found, row.get("paper"))


def configs(name: str) -> dict[str, Any]:
    """The settings of a file's runs by name; none where only rows are left."""
    content = stored(f"tables/{name}")
    if "config" in content:
        return {run["run"]: content["config"] for run in content["runs"]}
    return {run["name"]: run["config"] for run in content.get("runs", ())}


@cache
def regret_runs(*names: str) -> records.Runs:
    return records.read([RESULTS / "regret" / f"{name}.jsonl" for name in names])


def percent(found: Estimate | None) -> str:
    """A score times 100, with its deviation over seeds; a dash where there is none."""
    if found is None:
        return NONE
    deviation = None if found.deviation is None else 100 * found.deviation
    return number(replace(found, mean=100 * found.mean, deviation=deviation))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
