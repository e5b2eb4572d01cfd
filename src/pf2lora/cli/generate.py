"""`pf2lora generate`: what a client's model writes after a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pf2lora.cli.decoding import Beams, MaxNewTokens, Seed, Temperature, TopP, set_decoding
from pf2lora.cli.use import ClientName, Device, Json, Method, Model, Run, open_run
from pf2lora.errors import UserError, one_line
from pf2lora.parsing import check_text


def generate(
    run: Run,
    prompts: Annotated[list[str] | None, typer.Argument(help="The prompts to continue.")] = None,
    client: ClientName = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="A file of prompts: one a line, or a data file with a prompt column."),
    ] = None,
    beams: Beams = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    sampling_seed: Seed = None,
    method: Method = None,
    device: Device = "auto",
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Continue prompts with a client's model: one line of output for each prompt."""
    from pf2lora.data.files import Record
    from pf2lora.tasks.generation.prompts import read_prompts

    lines, records = read_prompts(file) if file else ([], [])
    lines = [*(prompts or []), *lines]
    if not lines and not records:
        raise UserError("nothing to continue: give prompts, or --file with one prompt a line")
    if any(not line.strip() for line in lines):
        raise UserError("an empty prompt cannot be continued")
    for line in lines:
        check_text(line, "the prompts")
    loaded = open_run(run, method, device, model)
    from pf2lora.tasks.generation.task import Generation

    task = loaded.task
    if not isinstance(task, Generation):
        raise UserError(f"{run} is a run of {task.name}; 'pf2lora predict' is for classification")
    set_decoding(
        loaded,
        beams=beams,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        sampling_seed=sampling_seed,
    )
    typed = [Record(task.settings.typed(line), "the prompts", f"line {n}") for n, line in enumerate(lines, 1)]
    rows = [row for part in (typed, records) if part for row in task.settings.questions(part, task.labels)]
    common, personal = loaded.client(client)
    texts = task.generate(loaded.model, common, personal, [rows])[0]
    if as_json:
        found = [{"prompt": row.prompt, "text": text} for row, text in zip(rows, texts)]
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    for text in texts:
        typer.echo(one_line(" ".join(text.split())))
