"""What commands print: the clients before a run, the scores after it."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console(soft_wrap=False, highlight=False)


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
        f"{escape(workload.config.model)} in {workload.config.precision} on {workload.device}"
    )


def score(value: float | None, percent: bool) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}" if percent else f"{value:.3f}"


def show_result(result: dict[str, Any], out: Path | None) -> None:
    """The headline table, warnings, and where to look further."""
    from pf2lora import results

    metric = result["metric"]
    about = result["metrics"][metric]
    seeds = len(next(iter(result["methods"].values()))["runs"])
    several = f", mean ± deviation of {seeds} seeds" if seeds > 1 else ""
    table = Table(
        title=f"{escape(result['title'])}: {about['label']} over clients{several}", title_justify="left"
    )
    for column in (
        "method",
        "served",
        "before averaging",
        "worst client",
        "spread",
        "sent per round",
        "seconds",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    served = {name: results.score(result, name, "served", metric) for name in result["methods"]}
    known = {name: e.mean for name, e in served.items() if e is not None}
    best = (max if about["higher_is_better"] else min)(known, key=lambda n: known[n], default=None)
    for name, method in result["methods"].items():
        run = method["runs"][0]

        def shown(point: results.Point, what: str = "mean", method_name: str = name) -> str:
            found = results.score(result, method_name, point, metric, what)
            if found is None:
                return "–"
            text = score(found.mean, about["percent"])
            return text if found.deviation is None else f"{text} ± {score(found.deviation, about['percent'])}"

        sent = run["bytes_per_round"]
        table.add_row(
            escape(method["label"]),
            shown("served"),
            shown("before_averaging"),
            shown("served", "worst"),
            shown("served", "spread"),
            f"{(sent['adapter'] + sent['head']) / 1e6:.2f} MB",
            f"{sum(r['seconds'] for r in method['runs']):.0f}",
            style="bold" if name == best else None,
        )
    console.print(table)
    for method in result["methods"].values():
        for run in method["runs"]:
            for line in run["warnings"]:
                console.print(f"[yellow]warning[/yellow] {escape(method['label'])}: {escape(line)}")
    if out is not None:
        console.print(f"report: {escape(str(out / 'report.html'))}", soft_wrap=True)
