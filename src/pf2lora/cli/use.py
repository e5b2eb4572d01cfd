"""Using a finished run: evaluate, onboard a new client, export a merged model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pf2lora.cli.options import WRITTEN, columned, with_columns
from pf2lora.errors import UserError, one_line

if TYPE_CHECKING:
    from pf2lora.run.confusion import OfLabel
    from pf2lora.run.saved import LoadedRun

LABELS_SHOWN = 30  # a longer list is for --json
Run = Annotated[Path, typer.Argument(help="The run folder.")]
ClientName = Annotated[str | None, typer.Option("--client", help="Whose model; without, the common one.")]
Method = Annotated[str | None, typer.Option("--method", help="Which method of a run of several.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Model = Annotated[
    str | None, typer.Option("--model", help="Where the base model is now (default: where it was).")
]
OwnRows = Annotated[
    Path | None,
    typer.Option(
        "--own-rows",
        help="FedDPA: the client's own data file; its adapter counts more for rows that are like these.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Plain JSON on standard output.")]


@columned
def evaluate(
    settings: dict[str, str],
    run: Run,
    file: Annotated[Path, typer.Argument(help="A file of labelled rows, as for training.")],
    client: ClientName = None,
    method: Method = None,
    device: Device = "auto",
    model: Model = None,
    own_rows: OwnRows = None,
    examples: Annotated[
        int,
        typer.Option("--examples", min=0, help="Answers to show as well; of labels, those that are wrong."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Measure a client's model on a file."""
    from pf2lora.data.loading import read_rows
    from pf2lora.run.confusion import macro_f1, of_labels

    loaded = open_run(run, method, device, model)
    task = with_columns(loaded.config.task, settings)
    rows = read_rows(task, file, loaded.saved.labels)
    own = None if own_rows is None else read_rows(task, own_rows, loaded.saved.labels)
    answers = loaded.answers(client, rows, own)
    scores = loaded.task.score(answers, rows)
    shown = [e._asdict() for e in loaded.task.examples(answers, rows, examples)] if examples else []
    counted = loaded.task.confusion(answers, rows)
    labels = dict(zip(loaded.task.labels, of_labels(counted))) if counted else {}
    if as_json:
        more: dict[str, Any] = (
            {"labels": {name: found._asdict() for name, found in labels.items()}} if labels else {}
        )
        more |= {"examples": shown} if examples else {}
        typer.echo(json.dumps(scores | {"rows": len(rows)} | more))
        return
    typer.echo(f"{len(rows)} rows of {file}, method {loaded.saved.method}")
    show_scores(loaded, {client or "the common model": scores})
    if counted and len(labels) <= LABELS_SHOWN:
        show_labels(labels, macro_f1(counted))
    for example in shown:
        typer.echo(one_line(f"row {example['row'] + 1}: {' '.join(example['prompt'].split())}"))
        typer.echo(one_line(f"  right: {' | '.join(example['references'])}; answered: {example['output']}"))


@columned
def onboard(
    settings: dict[str, str],
    run: Run,
    file: Annotated[Path, typer.Argument(help="The newcomer's labelled rows.")],
    client: Annotated[str, typer.Option("--client", help="The newcomer's name.")],
    test: Annotated[
        Path | None,
        typer.Option("--test", help="Its rows to measure on (default: a part of the file, held out)."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Rounds of local steps (default: the run's).")
    ] = None,
    client_lr: Annotated[
        str | None,
        typer.Option("--client-lr", help="The rate of its own adapter, or auto (default: the run's)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a newcomer of that name; never one of the run's clients.")
    ] = False,
    method: Method = None,
    device: Device = "auto",
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Choose what a new client deploys, on the frozen common adapter, and add the client to the run and its report."""
    rate = newcomer_rate(client_lr)
    loaded = open_run(run, method, device, model)
    loaded = replace(loaded, config=replace(loaded.config, task=with_columns(loaded.config.task, settings)))
    from pf2lora.report import choices
    from pf2lora.run.onboarding import onboard as fit_newcomer

    found = fit_newcomer(
        loaded,
        client,
        file,
        rounds,
        test=test,
        client_lr=rate,
        force=force,
        on_note=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    show_scores(loaded, {choices.WORDS[name]: scores for name, scores in found.scores.items()})
    typer.echo(f"{client} deploys: {choices.deployed(found)} ({choices.reason(found)})")
    typer.echo(f"{client} is part of the run: {loaded.where / 'clients' / client}")


def newcomer_rate(given: str | None) -> float | Literal["auto"] | None:
    """A rate as the command line takes it."""
    if given is None:
        return None
    if given == "auto":
        return "auto"
    try:
        rate = float(given)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf"):
        raise UserError(f"--client-lr is {given!r}; it must be a number of 0 or more, or auto")
    return rate


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.", **WRITTEN)],
    client: ClientName = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="One merged model instead of base and adapter.")
    ] = False,
    method: Method = None,
    model: Model = None,
) -> None:
    """Write a client's adapter as a PEFT folder, or merged into the base model."""
    from pf2lora.atomic import check_writable, new_folder, write_text
    from pf2lora.errors import check_path, reading
    from pf2lora.parsing import read_text

    with reading(check_path(out), "folder"):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{str(out)!r} exists and is not empty; choose another --out")
    check_writable(out.parent)
    loaded = open_run(run, method, "cpu", model)
    from pf2lora.adapters.peft import save_merged, save_peft
    from pf2lora.run.cards import CARD

    common, personal = loaded.client(client)
    with new_folder(out) as folder:
        if merge:
            save_merged(folder, loaded.model, common[0], personal[0], loaded.task.tokenizer)
        else:
            kind, base = loaded.task.peft_type, loaded.config.model.name
            save_peft(folder, loaded.model, common[0], personal[0], kind, base)
            card = loaded.where / ("common" if client is None else f"clients/{client}") / CARD
            if card.is_file():
                write_text(folder / CARD, read_text(card))
    typer.echo(str(out))


def open_run(run: Path, method: str | None, device: str, model: str | None = None) -> LoadedRun:
    """The run's method, on a device."""
    from pf2lora.run.config import config_file

    config_file(run)  # a wrong folder is said before torch is loaded
    from pf2lora.cli.show import quiet_libraries
    from pf2lora.run.saved import load_run

    quiet_libraries()
    loaded = load_run(run, method, device, model=model, on_note=lambda line: typer.echo(line, err=True))
    others = [name for name in loaded.config.training.method if name != loaded.saved.method]
    if others and method is None:
        typer.echo(
            f"method {loaded.saved.method}, the run's first (--method takes another: {', '.join(others)})",
            err=True,
        )
    return loaded


def show_labels(labels: dict[str, OfLabel], mean: float | None) -> None:
    """How good each label is."""
    from rich import box
    from rich.table import Table

    from pf2lora.cli.show import console
    from pf2lora.cli.text import safe

    def shown(value: float | None) -> str:
        return "–" if value is None else f"{value:.1%}"

    table = Table("label", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("F1", "precision", "recall", "rows"):
        table.add_column(column, justify="right")
    for name, found in labels.items():
        figures = (shown(found.f1), shown(found.precision), shown(found.recall), str(found.rows))
        table.add_row(safe(name), *figures)
    table.add_row("mean F1", shown(mean), "", "", "", style="dim")
    console.print(table)


def show_scores(loaded: LoadedRun, rows: dict[str, dict[str, float | None]]) -> None:
    from rich import box
    from rich.table import Table

    from pf2lora.cli.show import console, short_score
    from pf2lora.cli.text import safe

    metrics = loaded.task.metrics
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for metric in metrics.values():
        table.add_column(f"{metric.label} in %" if metric.percent else metric.label, justify="right")
    for name, scores in rows.items():
        table.add_row(safe(name), *(short_score(scores.get(key), m) for key, m in metrics.items()))
    console.print(table)
