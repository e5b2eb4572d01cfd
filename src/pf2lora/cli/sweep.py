"""`pf2lora sweep`: which rates to use, by validation rows."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from pf2lora.cli.options import configured, read_config
from pf2lora.cli.text import safe
from pf2lora.cli.train import Force, OutIfGiven
from pf2lora.methods import METHODS
from pf2lora.run.config import with_found_model

if TYPE_CHECKING:
    from pf2lora.run.sweep import Sweep
    from pf2lora.run.tries import Search, Try

Over = Annotated[
    list[str] | None,
    typer.Option(
        "--over",
        metavar="NAME=V1,V2,…",
        help="A rate, or another number of the methods or of training, and the values to try; several: all "
        "combinations [dim](default: lr=3e-4,1e-3,3e-3,1e-2)[/dim]",
        rich_help_panel="Everyday",
        show_default=False,
    ),
]
Together = Annotated[
    bool | None,
    typer.Option(
        "--together/--one-by-one",
        help="Train tries side by side in the same passes, where possible [dim](default: on an accelerator)[/dim]",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the sweep in the folder: keep its tries.")]


@configured
def sweep(
    settings: dict[str, Any],
    file: Path | None,
    over: Over = None,
    out: OutIfGiven = None,
    force: Force = False,
    resume: Resume = False,
    together: Together = None,
) -> None:
    """Try values of lr and other numbers, and choose by each client's validation rows; test rows are not looked at."""
    config = read_config(settings, file)
    from pf2lora.cli.show import quiet_libraries, show_clients, show_note
    from pf2lora.run import sweep as sweeps
    from pf2lora.run.tries import shown

    values = sweeps.parse_over(over) if over else sweeps.DEFAULT
    folder = out or Path(config.output.out or "runs/sweep")
    config = with_found_model(replace(config, output=replace(config.output, out=str(folder))))
    quiet_libraries()

    def told(method: str, tried: Try, number: int, of: int) -> None:
        how = f"broke off: {tried.failed}" if tried.score is None else f"validation loss {tried.score:.4f}"
        show_note(f"try {number} of {of}: {METHODS[method].label} with {shown(tried.rates)}: {how}")

    try:
        done = sweeps.sweep(
            config,
            values,
            folder,
            force=force,
            resume=resume,
            together=together,
            on_try=told,
            on_workload=show_clients,
        )
    except KeyboardInterrupt:
        typer.echo(f"pf2lora: stopped; go on with: {sweeps.again(folder, values)}", err=True)
        raise typer.Exit(130) from None
    show_sweep(done, folder)
    if not all(search.best for search in done.searches):
        raise typer.Exit(2)


def show_sweep(done: Sweep, out: Path) -> None:
    """Every try, what was chosen, and how to use it."""
    from pf2lora.cli.show import console
    from pf2lora.run import sweep as sweeps
    from pf2lora.run.tries import shown

    console.print("\n[bold]Tries[/bold], by what each client would deploy, on its validation rows")
    console.print(tries_table(done))
    for search in done.searches:
        label = safe(METHODS[search.method].label)
        if search.best is None:
            console.print(f"[red]failed[/red] {label}: {safe(search.tries[0].failed)}", soft_wrap=True)
            continue
        console.print(f"{label}: {safe(shown(search.chosen))} has the lowest validation loss")
        for name in done.at_an_end(search):
            console.print(f"  {name} is at an end of what was tried: a better value may lie beyond it")
    if any(search.best for search in done.searches):
        command = "train" if len(done.config.training.method) == 1 else "compare"
        console.print(
            f"use it: pf2lora {command} {safe(shlex.quote(str(out / sweeps.CHOSEN)))}", soft_wrap=True
        )
    console.print(f"table: {safe(str(out / sweeps.TABLE))}", soft_wrap=True)


def tries_table(done: Sweep) -> Table:
    """A line for each try, the chosen one in bold."""
    headline = next(iter(done.metrics), "score")
    several = len(done.searches) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in (*(["method"] if several else []), *done.over):
        table.add_column(name)
    columns = ["validation\nloss", f"validation\n{headline}", "training\nseconds"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for search in done.searches:
        for one in search.tries:
            rates = [value_shown(one.rates.get(name)) for name in done.over]
            label = [safe(METHODS[search.method].label)] if several else []
            table.add_row(
                *label, *rates, *figures(one, headline), style="bold" if chosen(search, one) else None
            )
    return table


def chosen(search: Search, one: Try) -> bool:
    return one is search.best


def value_shown(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else safe(str(value))


def figures(one: Try, headline: str) -> list[str]:
    """Loss, headline score and time of a try."""
    score = (one.metrics or {}).get(headline)
    return [
        "broke off" if one.score is None else f"{one.score:.4f}",
        "–" if score is None else f"{score:.4f}",
        "–" if one.seconds is None else f"{one.seconds:.1f}",
    ]
