"""What commands print: the clients before a run, the scores after it."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from pf2lora.cli.closing import closing
from pf2lora.cli.text import safe
from pf2lora.report import choices
from pf2lora.report.findings import conclusions
from pf2lora.run import numbers
from pf2lora.run.measured import by_measured_metric
from pf2lora.run.result import Point, Result
from pf2lora.run.verdicts import best
from pf2lora.tasks.settings import Metric

if TYPE_CHECKING:
    from pf2lora.run.workload import Workload

console = Console(soft_wrap=False, highlight=False)

POINTS: dict[Point, str] = {
    "served": "served",
    "before_averaging": "before\naveraging",
    "deploy": "deploy",
}
WARNINGS_SHOWN = 2  # of each method


def quiet_libraries() -> None:
    """Libraries' own bars and notes about new heads would bury ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


def show_clients(workload: Workload) -> None:
    """One line: how many clients, rows and where they run."""
    rows = [len(c.train) for c in workload.clients]
    tests = sum(len(c.test) for c in workload.clients)
    chosen_by = sum(len(c.validation) for c in workload.clients)
    validation = f"{chosen_by} validation and " if chosen_by else ""
    model = workload.config.model
    who = "1 client" if len(rows) == 1 else f"{len(rows)} clients"
    count = f"{min(rows)}" if min(rows) == max(rows) else f"{min(rows)} to {max(rows)}"
    each = " each" if len(rows) > 1 else ""
    console.print(
        f"{who} with {count} training rows{each}; {validation}{tests} test rows in all; "
        f"{safe(model.name)} in {model.precision} on {workload.device}",
        soft_wrap=True,
    )


def show_note(line: str) -> None:
    """What a run has to say while it goes on."""
    console.print(safe(line), soft_wrap=True)


def show_result(result: Result, out: Path | None) -> None:
    """The headline table, warnings, and where to look further."""
    result = by_measured_metric(result)
    about = result.metrics[result.metric]
    seeds = max(len(method.runs) for method in result.methods.values())
    several = f", mean ± deviation of {seeds} seeds" if seeds > 1 else ""
    unit = " in %" if about.percent else ""
    tests = sum(client.test for client in result.clients)
    console.print(
        f"\n[bold]{safe(result.title)}[/bold]: {about.label}{unit} over clients ({tests} test rows){several}"
    )
    console.print(score_table(result))
    for sentence in conclusions(result):
        console.print(safe(sentence))
    for name, method in result.methods.items():
        chosen = choices.sentence(result, name)
        if chosen:
            whose = f"{safe(method.label)} deploys" if len(result.methods) > 1 else "deploy"
            console.print(f"{whose}: {safe(chosen)}")
    for method in result.methods.values():
        for line in dict.fromkeys(run.privacy.sentence() for run in method.runs if run.privacy):
            console.print(f"privacy of {safe(method.label)}: {safe(line)}", soft_wrap=True)
    for method in result.methods.values():
        if method.failed is not None:
            console.print(f"[red]failed[/red] {safe(method.label)}: {safe(method.failed)}", soft_wrap=True)
        show_warnings(method.label, [line for run in method.runs for line in run.warnings])
    if out is not None:
        for line in closing(result, out):
            prose = line.startswith(("What", "For"))  # paths and commands are copied, and not broken
            console.print(line, soft_wrap=not prose, markup=False)
        console.print(f"report: {safe(str(out / 'report.html'))}", soft_wrap=True)


def score_table(result: Result) -> Table:
    """One line per method, the best in bold (several, if test rows and seeds cannot tell them apart): by what clients
    deploy, where all chose; worst client and spread are of the same. Narrow enough for 80 columns with deviations, for
    which the spread makes room."""
    about = result.metrics[result.metric]

    def shown(name: str, point: Point, what: str = "mean") -> str:
        found = result.estimate(name, point, result.metric, what)
        if found is None:
            return "–"
        text = short_score(found.mean, about)
        return text if found.deviation is None else f"{text}±{short_score(found.deviation, about)}"

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", overflow="fold")
    runs = [run for method in result.methods.values() for run in method.runs]
    points = [point for point in POINTS if point != "deploy" or any(run.deploy for run in runs)]
    spread = len(points) < len(POINTS) or all(len(m.runs) == 1 for m in result.methods.values())
    of_clients = ("worst\nclient", "spread") if spread else ("worst\nclient",)
    for column in (*(POINTS[p] for p in points), *of_clients, "sent per\nround", "training\ntime"):
        table.add_column(column, justify="right", no_wrap=True)
    leading = best(result)
    for name, method in result.methods.items():
        table.add_row(
            safe(method.label),
            *(shown(name, point) for point in points),
            shown(name, result.point, "worst"),
            *([shown(name, result.point, "spread")] if spread else []),
            numbers.size(method.runs[0].bytes_per_round.total) if method.runs else "–",
            numbers.short_duration(sum(run.seconds for run in method.runs)) if method.runs else "failed",
            style="bold" if name in leading else None,
        )
    for baseline in result.baselines.values():
        scores = baseline.scores.get(result.metric)
        if scores is not None and scores.mean is not None:
            figures = {result.point: scores.mean, "worst": scores.worst, "spread": scores.spread}
            columns = (*points, "worst", *(["spread"] if spread else []))
            texts = [short_score(figures[c], about) if c in figures else "" for c in columns]
            table.add_row(safe(baseline.label), *texts, "", "", style="dim")
    return table


def short_score(value: float | None, metric: Metric) -> str:
    """A score for a narrow table: one decimal in per cent."""
    return numbers.score(value, metric, digits=1 if metric.percent else 3)


def show_warnings(label: str, lines: list[str]) -> None:
    """A method's first few warnings; the report has them all."""
    head = f"[yellow]warning[/yellow] {safe(label)}: "
    for line in lines[:WARNINGS_SHOWN]:
        console.print(head + safe(line), soft_wrap=True)
    if len(lines) > WARNINGS_SHOWN:
        console.print(f"{head}and {len(lines) - WARNINGS_SHOWN} more like these; the report lists them")
