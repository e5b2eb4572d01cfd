"""`pf2lora predict`: what a client's model answers, for every task: labels, answers to questions, texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pf2lora.cli.decoding import Beams, MaxNewTokens, Seed, Temperature, TopP, set_decoding
from pf2lora.cli.options import WRITTEN, columned, with_columns
from pf2lora.cli.use import ClientName, Device, Json, Method, Model, OwnRows, Run, open_run
from pf2lora.errors import UserError, one_line


@columned
def predict(
    settings: dict[str, str],
    run: Run,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts to classify, or prompts (pairs: a tab between; questions: question, tab, context)."
        ),
    ] = None,
    client: ClientName = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="A data file as for training, labels not needed; .txt: one text a line."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write the rows with their answers: .jsonl, .json, .csv, .tsv, .parquet.", **WRITTEN
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the --out file.")] = False,
    method: Method = None,
    device: Device = "auto",
    model: Model = None,
    own_rows: OwnRows = None,
    beams: Beams = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    sampling_seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Answer rows with a client's model: labels with their probabilities, answers to questions, texts."""
    from pf2lora.data.files import Record
    from pf2lora.data.writing import check_record_file, write_records

    lines, table = asked(texts or [], file)
    if out is not None:
        check_record_file(out, force)
    loaded = open_run(run, method, device, model)
    set_decoding(
        loaded,
        beams=beams,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        sampling_seed=sampling_seed,
    )
    task, traits = with_columns(loaded.config.task, settings), loaded.saved.traits
    if table is not None:
        records = task.read_records(table)
    else:
        records = [
            Record(task.typed(t, traits), "the command line", f"text {n}") for n, t in enumerate(lines, 1)
        ]
    rows = task.questions(records, loaded.saved.labels, traits)
    like = None
    if own_rows is not None:
        like = task.questions(task.read_records(own_rows), loaded.saved.labels, traits)
    answers = loaded.answers(client, rows, like)
    found = [loaded.task.answer(answer, row) for answer, row in zip(answers, rows)]
    for note in loaded.task.notes:
        typer.echo(note, err=True)
    answered: list[dict[str, Any]] = [record.values | own for record, own in zip(records, found)]
    if out is not None:
        write_records(out, answered)
        typer.echo(f"{len(answered)} rows with what {client or 'the common model'} answers: {out}", err=True)
    if as_json:
        typer.echo(json.dumps(answered, ensure_ascii=False, default=str))
    elif out is None:
        for own, line, row in zip(found, lines or [first_text(r.values) for r in records], rows):
            typer.echo(readable(own, line or loaded.task.input_text(row)))


def asked(texts: list[str], file: Path | None) -> tuple[list[str], Path | None]:
    """The texts to answer, typed or one a line of a file; or the data file whose rows are."""
    from pf2lora.data.files import READERS, kind_of
    from pf2lora.parsing import check_text, read_text

    table = file if file is not None and kind_of(file) in READERS else None
    lines = list(texts)
    if file is not None and table is None:
        lines += [line for line in read_text(file).splitlines() if line.strip()]
    if lines and table is not None:
        raise UserError("give texts, or --file with a data file, not both")
    if not lines and table is None:
        raise UserError("nothing to predict: give texts, or --file with a data file or one text a line")
    if any(not line.strip() for line in lines):
        raise UserError("an empty text cannot be answered")
    return [check_text(line, "the texts") for line in lines], table


def first_text(values: dict[str, Any]) -> str:
    """What a row is recognised by."""
    return next((value for value in values.values() if isinstance(value, str)), "")


def readable(found: dict[str, Any], line: str) -> str:
    """One line: the answer, how sure it is where that is known, and what was asked."""
    sure = found.get("probability")
    parts = [found["predicted"] or "(no answer)", *([] if sure is None else [f"{sure:.3f}"]), line]
    return "\t".join(one_line(" ".join(str(part).split())) for part in parts)
