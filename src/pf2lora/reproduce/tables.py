"""The run's own numbers beside the paper's: one row for each run, method and quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pf2lora.errors import UserError, unknown
from pf2lora.methods import METHODS
from pf2lora.reproduce.preset import Run
from pf2lora.run import numbers
from pf2lora.run.costs import BYTES_PER_NUMBER
from pf2lora.run.estimates import Estimate, estimate
from pf2lora.run.result import Point, Result, SeedRun
from pf2lora.run.tries import Search


@dataclass(frozen=True)
class Quantity:
    """What a number is of, and how it is written."""

    label: str
    write: Callable[[float], str]
    times: float = 1  # what a figure's axis shows of a fraction


@dataclass(frozen=True)
class Finding:
    """What came of a run: a result where it was trained (after a `search` for rates), else what was counted."""

    run: Run
    result: Result | None = None
    counted: Mapping[str, Mapping[str, float]] | None = None
    searches: Sequence[Search] = ()
    diverged: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """A quantity of a method. `served` is what a client deploys, or the one value where there are no two points."""

    run: Run
    method: str
    quantity: str
    served: Estimate | None
    before: Estimate | None
    paper: float | None


# --- quantities that are no metric of a task ------------------------------------------------------------------


def mean_losses(run: SeedRun) -> list[float | None]:
    """Each round's training loss, the mean over the clients that took part; None where one is no number."""
    found: list[float | None] = []
    for record in run.rounds:
        known = [loss for loss in record.train_loss if loss is not None]
        found.append(fmean(known) if known else None)
    return found


def roughness(run: SeedRun) -> float | None:
    """How much the clients' mean training loss changes from a round to the next, over the second half."""
    losses = mean_losses(run)
    half = losses[len(losses) // 2 :] if len(losses) > 3 else losses
    steps = [None if a is None or b is None else abs(b - a) for a, b in pairwise(half)]
    known = [step for step in steps if step is not None]
    return fmean(known) if known and len(known) == len(steps) else None


OF_RUN: dict[str, Callable[[SeedRun], float | None]] = {
    "parameters": lambda run: run.parameters.common + run.parameters.client,
    "sent_parameters": lambda run: run.bytes_per_round.adapter / BYTES_PER_NUMBER,
    "tflops": lambda run: None if run.flops_per_round is None else run.flops_per_round / 1e12,
    "training_loss": lambda run: mean_losses(run)[-1],
    "roughness": roughness,
    "seconds": lambda run: run.seconds,
    "memory": lambda run: None if run.peak_memory_bytes is None else float(run.peak_memory_bytes),
}
QUANTITIES = {
    "parameters": Quantity("trainable parameters", lambda v: f"{v / 1e6:.2f}M" if v > 1e4 else f"{v:.0f}"),
    "sent_parameters": Quantity(
        "numbers sent a round", lambda v: f"{v / 1e6:.2f}M" if v > 1e4 else f"{v:.0f}"
    ),
    "tflops": Quantity("TFLOP a round", lambda v: f"{v:.2f}" if v >= 0.01 else f"{v:.2g}"),
    "tflops_ratio": Quantity("operations, HOMLoRA = 1", lambda v: f"{v:.2f}"),
    "training_loss": Quantity("training loss, last round", lambda v: f"{v:.3f}"),
    "roughness": Quantity("roughness of the training loss", lambda v: f"{v:.4f}"),
    "seconds": Quantity("training, s", lambda v: f"{v:.0f}"),
    "memory": Quantity("peak memory", numbers.size),
}


def quantity_of(name: str, finding: Finding) -> Quantity:
    """A quantity by name: a metric of the run's task, or one of those above."""
    if name in QUANTITIES:
        return QUANTITIES[name]
    metrics = finding.result.metrics if finding.result else {}
    if name not in metrics:
        raise UserError(f"run {finding.run.name}: {unknown('quantity', name, [*metrics, *QUANTITIES])}")
    metric = metrics[name]
    label = f"{metric.label}, %" if metric.percent else metric.label
    return Quantity(label, lambda v: numbers.score(v, metric), 100 if metric.percent else 1)


# --- rows -----------------------------------------------------------------------------------------------------


def quantities(finding: Finding) -> list[str]:
    """What a run shows: what it says, else what the paper has numbers of, else its task's headline."""
    named = [*finding.run.paper, *(name for name in finding.run.show if name not in finding.run.paper)]
    if not named and finding.result is not None:
        named = [finding.result.metric]
    for name in named:
        quantity_of(name, finding)
    return named


def rows(finding: Finding) -> list[Row]:
    """Every quantity of every method that was run."""
    run, found = finding.run, []
    for name in quantities(finding):
        for asked in run.config.training.method:
            method = METHODS[asked].name
            paper = run.paper.get(name, {}).get(method)
            served, before = _measured(finding, method, name)
            found.append(Row(run, method, name, served, before, paper))
    return found


def _measured(finding: Finding, method: str, name: str) -> tuple[Estimate | None, Estimate | None]:
    if finding.counted is not None:
        return estimate([finding.counted.get(name, {}).get(method)]), None
    assert finding.result is not None
    result = finding.result
    if method not in result.methods:  # it diverged
        return None, None
    if name in OF_RUN:
        return estimate(OF_RUN[name](run) for run in result.methods[method].runs), None
    points: tuple[Point, Point] = ("served", "before_averaging")
    served, before = (result.estimate(method, point, name) for point in points)
    return served, before


def cost_rows(finding: Finding) -> list[list[str]]:
    """What each method of a trained run cost, as written: a row per method."""
    assert finding.result is not None
    found = []
    for name, method in finding.result.methods.items():
        cells = [written(_measured(finding, name, q)[0], QUANTITIES[q]) for q in COSTS]
        found.append([finding.run.label, method.label, *cells])
    return found


COSTS = ("parameters", "sent_parameters", "tflops", "seconds", "memory")


def written(value: Estimate | float | None, quantity: Quantity) -> str:
    """A number as the table has it: `95.85`, or `95.85 ± 0.21` over seeds."""
    if value is None:
        return "–"
    if not isinstance(value, Estimate):
        return quantity.write(value)
    text = quantity.write(value.mean) if math.isfinite(value.mean) else "–"
    return text if value.deviation is None else f"{text} ± {quantity.write(value.deviation)}"


HEAD = ("run", "method", "quantity", "served", "before averaging", "paper")
COUNTED_HEAD = ("model", "method", "quantity", "counted", "paper")


def head(findings: Sequence[Finding]) -> tuple[str, ...]:
    """The columns of the table; what is only counted has no two points."""
    return COUNTED_HEAD if all(f.counted is not None for f in findings) else HEAD


def cells(findings: Sequence[Finding]) -> list[list[str]]:
    """The table as written."""
    counted, table = head(findings) == COUNTED_HEAD, []
    for finding in findings:
        for row in rows(finding):
            quantity = quantity_of(row.quantity, finding)
            ours = [row.served] if counted else [row.served, row.before]
            label = METHODS[row.method].label if row.method in METHODS else row.method
            line = [row.run.label, label, quantity.label, *(written(e, quantity) for e in ours)]
            table.append([*line, written(row.paper, quantity)])
    return table
