"""`--dry-run`: what a run would do, what it would cost, and everything that is wrong with it, at once."""

from __future__ import annotations

import typer

from pf2lora.run.config import Config


def show_dry_run(config: Config) -> None:
    """Print it; a run that cannot be is exit code 2, with a line for each thing that stands in its way."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from pf2lora.cli.data import print_summary
    from pf2lora.cli.show import console, quiet_libraries
    from pf2lora.data.loading import filled_in
    from pf2lora.data.sharing import describe
    from pf2lora.data.summary import summarize
    from pf2lora.run import numbers
    from pf2lora.run.dry_run import plan, problems
    from pf2lora.run.workload import load_workload

    found = list(problems(config))
    if found:
        for line in found:
            typer.echo(f"pf2lora: {line}", err=True)
        raise typer.Exit(2)
    quiet_libraries()
    workload = load_workload(config)
    titles = {name: dataset.title for name, dataset in config.task.datasets.items()}
    title = describe(filled_in(config.task, config.data), titles)
    summary = summarize(workload.clients, config.task.partition_key)
    print_summary(summary, console, title, [len(client.validation) for client in workload.clients])
    planned = plan(config, workload)
    console.print("\n[bold]Two rows as the model sees them[/bold]")
    for example in planned.examples:
        console.print(escape(example), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", overflow="fold")
    columns = ("trained\nper client", "sent per\nround", "a step\nof all", "training", "evaluation", "memory")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for method in planned.methods:
        p = method.parameters
        table.add_row(
            escape(method.label),
            numbers.count(p.common + p.client + p.head),
            numbers.size(method.sent.total),
            numbers.duration(method.step_seconds),
            numbers.duration(method.training_seconds),
            numbers.duration(method.evaluation_seconds),
            numbers.size(method.memory_bytes),
        )
    training = config.training
    console.print(
        f"\n[bold]{training.rounds} rounds of {training.steps} steps, {training.seeds} seed"
        f"{'s' if training.seeds > 1 else ''}[/bold], times from {workload.device} just now, about"
    )
    console.print(table)
    total = sum(m.training_seconds + m.evaluation_seconds for m in planned.methods)
    console.print(f"all of it: about {numbers.duration(total)}; nothing was trained or written")
    for line in planned.warnings:
        console.print(f"[yellow]warning[/yellow] {escape(line)}", soft_wrap=True)
