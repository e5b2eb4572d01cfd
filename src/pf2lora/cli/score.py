"""`pf2lora score`: the official scores of E2E, WebNLG and SQuAD for any system's output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pf2lora.errors import UserError
from pf2lora.parsing import read_json, read_text

if TYPE_CHECKING:
    from pf2lora.tasks.generation.scores import Scores

app = typer.Typer(
    no_args_is_help=True, help="Score outputs as the official scripts of E2E, WebNLG and SQuAD do."
)

SystemFile = Annotated[Path, typer.Option("--system", help="The outputs, one a line.")]
ReferenceFile = Annotated[
    Path,
    typer.Option("--references", help="The references, one a line; those of an item end at a blank line."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Only the values on standard output, as a JSON object.")]


@app.command()
def e2e(system: SystemFile, references: ReferenceFile, as_json: AsJson = False) -> None:
    """BLEU, NIST, METEOR, ROUGE-L and CIDEr, as the E2E challenge's script."""
    from pf2lora.tasks.generation.scores import e2e_scores

    _show_scores("E2E", e2e_scores(*read_items(system, references)), as_json)


@app.command()
def webnlg(system: SystemFile, references: ReferenceFile, as_json: AsJson = False) -> None:
    """BLEU, METEOR, TER and ROUGE-L, as the LoRA paper's evaluation of WebNLG."""
    from pf2lora.tasks.generation.scores import webnlg_scores

    _show_scores("WebNLG", webnlg_scores(*read_items(system, references)), as_json)


@app.command()
def squad(
    data: Annotated[Path, typer.Option(help="Questions and golds: official SQuAD JSON, v1.1 or v2.0.")],
    predictions: Annotated[Path, typer.Option(help="JSON object: question id -> answer ('' is no answer).")],
    na_probs: Annotated[
        Path | None, typer.Option(help="v2.0: JSON object: question id -> probability of no answer.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Exact match and F1, as the official v1.1 or v2.0 script (whichever the data is)."""
    from pf2lora.tasks.question_answering.scores import evaluate, is_v2

    dataset = read_json_object(data)
    probabilities = read_json_object(na_probs) if na_probs else None
    values = evaluate(dataset, read_json_object(predictions), probabilities)
    _show(f"SQuAD {'v2.0' if is_v2(dataset) else 'v1.1'}", values, {}, as_json)


def read_items(system: Path, references: Path) -> tuple[list[str], list[list[str]]]:
    """The outputs and, item by item, their references.

    A reference file without any blank line has one reference an item, as for the official E2E script.
    """
    outputs = _lines(system)
    lines = _lines(references)
    while lines and not lines[-1]:
        lines.pop()
    items: list[list[str]] = [[]]
    for number, line in enumerate(lines, start=1):
        if line:
            items[-1].append(line)
        elif items[-1]:
            items.append([])
        else:
            raise UserError(
                f"{references}: line {number}: item {len(items)} has no reference before this blank line"
            )
    if len(items) == 1 and len(items[0]) == len(outputs):
        items = [[line] for line in items[0]]
    if len(outputs) != len(items):
        raise UserError(
            f"{system} has {len(outputs)} outputs, but {references} has references of {len(items)} items"
        )
    return outputs, items


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is needed, not a {type(value).__name__}")
    return value


def _lines(path: Path) -> list[str]:
    # Not splitlines(): a text may hold characters such as U+2028, which end no line of the file.
    text = read_text(path)
    if not text:
        raise UserError(f"{path} is empty")
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def _show_scores(title: str, scores: Scores, as_json: bool) -> None:
    if not scores.values:
        raise UserError("; ".join(dict.fromkeys(scores.absent.values())))
    _show(title, scores.values, scores.absent, as_json)


def _show(title: str, values: Mapping[str, float], absent: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        _print_table(title, values, absent)
    for reason in dict.fromkeys(absent.values()):
        names = ", ".join(name for name in absent if absent[name] == reason)
        typer.echo(f"absent: {names}: {reason}", err=True)


def _print_table(title: str, values: Mapping[str, float], absent: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("score", title=title)
    table.add_column("value", justify="right")
    for name, value in values.items():
        table.add_row(name, str(value) if isinstance(value, int) else f"{value:.4f}")
    for name in absent:
        table.add_row(name, "absent", style="yellow")
    Console().print(table)
