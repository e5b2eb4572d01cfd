"""`pf2lora data`: look at what each client gets before training on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pf2lora.cli.options import WRITTEN, ListCommand, described, read_config
from pf2lora.cli.text import safe
from pf2lora.errors import UserError, listed

if TYPE_CHECKING:
    from pf2lora.data.client import Client
    from pf2lora.data.summary import Summary
    from pf2lora.run.config import Config

app = typer.Typer(help="Look at the data that each client gets.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at the data that each client gets."""


@described
def show(
    settings: dict[str, Any],
    file: Path | None,
    client: Annotated[
        str | None, typer.Option("--client", help="Whose row is shown, with --model (default: the first's).")
    ] = None,
    example: Annotated[
        int, typer.Option("--example", min=1, help="Which of its training rows is shown, with --model.")
    ] = 1,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw it too: a .svg, .png or .pdf file.", **WRITTEN)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the figure.")] = False,
) -> None:
    """Print, and draw with --figure, what each client got: sizes and shares of labels, topics or categories; with
    --model, also a row as that model sees it: its tokens, and which of them it is to find."""
    from pf2lora.data.figure import check_figure_file, draw
    from pf2lora.data.loading import filled_in, load_clients
    from pf2lora.data.sharing import describe
    from pf2lora.data.summary import summarize

    if figure is not None:
        check_figure_file(figure, force)
    config = read_config(settings, file)
    notes: list[str] = []
    clients = load_clients(config.task, config.data, config.training.seed, notes=notes)
    titles = {name: dataset.title for name, dataset in config.task.datasets.items()}
    title = describe(filled_in(config.task, config.data), titles)
    summary = summarize(clients, config.task.partition_key)
    print_summary(summary, Console(), title, [len(client.validation) for client in clients])
    if config.model.name:
        notes += show_row(config, clients, client, example)
    for line in notes:
        Console().print(safe(line), highlight=False, style="dim")
    if figure is not None:
        draw(summary, figure, title)
        Console().print(f"figure: {figure}", highlight=False, markup=False, soft_wrap=True)


app.command(cls=ListCommand, no_args_is_help=True)(show)


def show_row(config: Config, clients: list[Client[Any]], name: str | None, number: int) -> list[str]:
    """Print a training row as the model sees it; what its task has to say."""
    from pf2lora.cli.example import print_example
    from pf2lora.run.workload import build_task

    found = next((c for c in clients if name in (None, c.name)), None)
    if found is None:
        raise UserError(f"there is no client {name!r}; the clients: {listed(c.name for c in clients)}")
    if number > len(found.train):
        raise UserError(f"client {found.name!r} has {len(found.train)} training rows, and no row {number}")
    task = build_task(config, config.task.labels(clients))
    shown = task.show(found.train[number - 1])
    console = Console(highlight=False)
    marks = "in colour" if console.is_terminal and not console.no_color else "between « and »"
    what = f": what it is to find {marks}" if any(shown.marked) else ""
    console.print(
        f"\n[bold]{safe(found.name)}, row {number}, as {safe(config.model.name)} sees it[/bold]{what}"
    )
    print_example(shown, console)
    return task.notes


def print_summary(summary: Summary, console: Console, title: str, validation: list[int]) -> None:
    """A table: one line per client with sizes and a bar for each label's share of its training rows."""
    validated = any(validation)
    shown = summary.with_most(max(2, min(6, (console.width - (48 if validated else 36)) // 16)))
    table = Table(title=safe(title), title_justify="left", title_style="bold", header_style="bold", box=None)
    table.add_column("client", overflow="fold")
    for part in ("train", "validation", "test") if validated else ("train", "test"):
        table.add_column(part, justify="right")
    for name in shown.labels:
        table.add_column(safe(name), no_wrap=True, overflow="ellipsis", max_width=20)
    for i, client in enumerate(shown.clients):
        sizes = _sizes(shown.train[i].sum(), validation[i] if validated else None, shown.test[i].sum())
        table.add_row(safe(client), *sizes, *map(_bar, shown.train_shares[i]))
    totals = _sizes(shown.train.sum(), sum(validation) if validated else None, shown.test.sum())
    shares = shown.train.sum(axis=0) / shown.train.sum()
    table.add_section()
    table.add_row("all", *totals, *map(_bar, shares), style="dim")
    console.print(table)
    console.print(safe(_remarks(summary)), highlight=False, style="dim")


def _sizes(train: int, validation: int | None, test: int) -> list[str]:
    return [f"{size:,}" for size in (train, validation, test) if size is not None]


def _bar(share: float, width: int = 8) -> str:
    """A small bar, drawn in eighths of a character, and the share as a percentage."""
    eighths = round(share * width * 8)
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    percent = f"{share:.0%}" if share == 0 or share >= 0.005 else "<1%"
    return f"{bar:<{width}} {percent:>4}"


def _remarks(summary: Summary) -> str:
    gaps = abs(summary.train_shares - summary.test_shares).max(axis=1)
    widest = int(gaps.argmax())
    return (
        f"bars: shares of labels in train; skew {summary.skew:.2f} (0: all clients alike); train and test shares "
        f"differ by at most {100 * gaps[widest]:.1f} points ({summary.clients[widest]})"
    )
