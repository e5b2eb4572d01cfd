"""What commands print: the clients before a run, the scores after it."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console(soft_wrap=False, highlight=False)

COLUMNS = ("served", "before\naveraging", "worst\nclient", "spread", "sent per\nround", "seconds")
WARNINGS_SHOWN = 2  # of each method


def quiet_libraries() -> None:
    """Libraries' own bars and notes about new heads would bury ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


def show_clients(workload: Any) -> None:
    """One line: how many clients, rows and where they run."""
    rows = [len(c.train) for c in workload.clients]
    tests = sum(len(c.test) for c in workload.clients)
    console.print(
        f"{len(rows)} clients with {min(rows)} to {max(rows)} training rows, {tests} test rows in all; "
        f"{escape(workload.config.model)} in {workload.config.precision} on {workload.device}",
        soft_wrap=True,
    )


def score(value: float | None, percent: bool) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}" if percent else f"{value:.3f}"


def size(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def show_result(result: dict[str, Any], out: Path | None) -> None:
    """The headline table, warnings, and where to look further."""
    about = result["metrics"][result["metric"]]
    seeds = len(next(iter(result["methods"].values()))["runs"])
    several = f", mean ± deviation of {seeds} seeds" if seeds > 1 else ""
    unit = " in %" if about["percent"] else ""
    console.print(f"\n[bold]{escape(result['title'])}[/bold]: {about['label']}{unit} over clients{several}")
    console.print(score_table(result))
    for method in result["methods"].values():
        show_warnings(method["label"], [line for run in method["runs"] for line in run["warnings"]])
    if out is not None:
        console.print(f"report: {escape(str(out / 'report.html'))}", soft_wrap=True)


def score_table(result: dict[str, Any]) -> Table:
    """One line per method, the best in bold; narrow enough for 80 columns with deviations."""
    from pf2lora.run import result as results

    metric = result["metric"]
    about = result["metrics"][metric]

    def shown(name: str, point: results.Point, what: str = "mean") -> str:
        found = results.score(result, name, point, metric, what)
        if found is None:
            return "–"
        text = score(found.mean, about["percent"])
        return text if found.deviation is None else f"{text}±{score(found.deviation, about['percent'])}"

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    served = {name: results.score(result, name, "served", metric) for name in result["methods"]}
    known = {name: e.mean for name, e in served.items() if e is not None}
    best = (max if about["higher_is_better"] else min)(known, key=lambda n: known[n], default=None)
    for name, method in result["methods"].items():
        table.add_row(
            escape(method["label"]),
            shown(name, "served"),
            shown(name, "before_averaging"),
            shown(name, "served", "worst"),
            shown(name, "served", "spread"),
            size(sum(method["runs"][0]["bytes_per_round"].values())),
            f"{sum(r['seconds'] for r in method['runs']):.0f}",
            style="bold" if name == best else None,
        )
    return table


def show_warnings(label: str, lines: list[str]) -> None:
    """A method's first few warnings; the report has them all."""
    head = f"[yellow]warning[/yellow] {escape(label)}: "
    for line in lines[:WARNINGS_SHOWN]:
        console.print(head + escape(line), soft_wrap=True)
    if len(lines) > WARNINGS_SHOWN:
        console.print(f"{head}and {len(lines) - WARNINGS_SHOWN} more like these; the report lists them")
