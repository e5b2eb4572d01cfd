"""`pf2lora methods`: what there is to choose from, a line each."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from pf2lora.methods import METHODS, SETS, resolved

WIDTH = 160  # where nobody's terminal says otherwise: a line for each method


@dataclass(frozen=True)
class Listed:
    """A method in words: what it is, what leaves a client, what is the client's own, what a local step costs."""

    name: str
    label: str
    sets: list[str]
    summary: str
    sent: str
    personal: str
    gradients_per_step: int
    parameters: list[str]  # what [methods.NAME] may hold


def listed(names: list[str]) -> list[Listed]:
    """The methods, and sets of them, that are asked for; all without names."""
    found = []
    for name in resolved(names or ["all"]):
        kind = METHODS[name]
        found.append(
            Listed(
                *(name, kind.label, [own for own, members in SETS.items() if name in members]),
                *(kind.summary, kind.sent_part, kind.personal_part),
                gradients_per_step=kind.gradients_per_step,
                parameters=list(kind.parameters()),
            )
        )
    return found


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Methods, or sets of them: {', '.join(SETS)}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for other programs.")] = False,
) -> None:
    """List the methods: what each does, what it sends, what is the client's own, and its gradients per local step."""
    found = listed(names or [])
    if as_json:
        typer.echo(json.dumps([asdict(method) for method in found], ensure_ascii=False, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    from pf2lora.cli.text import safe

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("method", "", "sends", "own", "gradients"):
        table.add_column(title, overflow="fold")
    for method in found:
        about = (method.name, method.summary, method.sent, method.personal, str(method.gradients_per_step))
        table.add_row(*map(safe, about))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(
        "\nx is the common adapter, with the head unless that is personal or frozen. Gradients: passes forward and "
        "back of one local step."
    )
    for name, members in SETS.items():
        console.print(f"[bold]{name}[/bold]: {', '.join(members)}", highlight=False)
