"""`--dry-run`: what a run would do, what it would cost, and everything that is wrong with it, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from pf2lora.run.config import Config

if TYPE_CHECKING:
    from pf2lora.run.dry_run import MethodPlan, Plan
    from pf2lora.run.workload import Workload

NOTHING = "nothing was trained or written"


def show_dry_run(config: Config, *checks: Callable[[], Any]) -> None:
    """Print it; a run that cannot be is exit code 2, with a line for each thing that stands in its way, of which
    `checks` may find some more."""
    planned, workload = planned_run(config, *checks)
    show_costs(config, planned.methods, str(workload.device))
    total = sum(m.training_seconds + m.evaluation_seconds for m in planned.methods)
    end(f"all of it: about {in_words(total)}; {NOTHING}", planned.warnings)


def planned_run(config: Config, *checks: Callable[[], Any]) -> tuple[Plan, Workload]:
    """Show what each client got and two rows as the model sees them, and time the methods."""
    from pf2lora.cli.data import print_summary
    from pf2lora.cli.example import print_example
    from pf2lora.cli.show import console, quiet_libraries
    from pf2lora.data.loading import filled_in
    from pf2lora.data.sharing import describe
    from pf2lora.data.summary import summarize
    from pf2lora.run.dry_run import plan, problems
    from pf2lora.run.workload import load_workload

    quiet_libraries()
    stop_at(problems(config, *checks))
    workload = load_workload(config)
    titles = {name: dataset.title for name, dataset in config.task.datasets.items()}
    title = describe(filled_in(config.task, config.data), titles)
    summary = summarize(workload.clients, config.task.partition_key)
    print_summary(summary, console, title, [len(client.validation) for client in workload.clients])
    planned = plan(config, workload)
    console.print("\n[bold]Two rows as the model sees them[/bold]")
    for example in planned.examples:
        print_example(example, console)
    return planned, workload


def stop_at(problems: Iterable[str]) -> None:
    """A line for each, on standard error, and exit code 2; nothing where there are none."""
    from pf2lora.errors import one_line

    found = list(problems)
    for line in found:
        typer.echo(f"pf2lora: {one_line(line)}", err=True)
    if found:
        raise typer.Exit(2)


def show_costs(config: Config, methods: Sequence[MethodPlan], device: str, per_number: float = 1.0) -> None:
    """A table of what each method trains, sends and takes; `per_number` is the share of what is sent at full width."""
    from rich import box
    from rich.table import Table

    from pf2lora.cli.show import console
    from pf2lora.cli.text import safe
    from pf2lora.run import numbers

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", overflow="fold")
    columns = ("trained\nper client", "sent per\nround", "a step\nof all", "training", "evaluation", "memory")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for method in methods:
        p = method.parameters
        table.add_row(
            safe(method.label),
            numbers.count(p.common + p.client + p.head),
            numbers.size(method.sent.total * per_number),
            in_words(method.step_seconds),
            in_words(method.training_seconds),
            in_words(method.evaluation_seconds),
            numbers.size(method.memory_bytes),
        )
    training = config.training
    seeds = f"{training.seeds} seed{'s' if training.seeds > 1 else ''}"
    rates = " or ".join(dict.fromkeys(f"{method.lr:g}" for method in methods))
    length = f"{training.rounds} rounds of {training.steps} steps, lr {rates}, {seeds}"
    console.print(f"\n[bold]{length}[/bold], times from {device} just now, about")
    console.print(table)


def end(line: str, warnings: Iterable[str] = ()) -> None:
    from pf2lora.cli.show import console
    from pf2lora.cli.text import safe

    console.print(safe(line), soft_wrap=True)
    for warning in warnings:
        console.print(f"[yellow]warning[/yellow] {safe(warning)}", soft_wrap=True)


def in_words(seconds: float) -> str:
    """`0.31 s`, `45 s`, `3 min 05 s`."""
    from pf2lora.run import numbers

    return numbers.duration(round(seconds) if seconds >= 10 else float(f"{seconds:.2g}"))
