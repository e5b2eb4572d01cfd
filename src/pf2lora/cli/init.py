"""`pf2lora init`: a first run.toml, asked for on a terminal, from flags and guesses elsewhere."""

from __future__ import annotations

import glob
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pf2lora.cli.options import WRITTEN, choices, task_choices, with_settings
from pf2lora.errors import UserError, one_line, unknown
from pf2lora.settings import column_settings
from pf2lora.tasks import TASKS

GIVEN = ("clients", "test", "client_column", "model", "device", "method", "task")
EXAMPLE = 50  # characters of a value that are shown


def init(
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option("--out", help="The file to write.", **WRITTEN)] = Path("run.toml"),
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take what is guessed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a first run.toml: looks into your files, asks what it cannot know, and says what to do next."""
    from pf2lora.atomic import write_text
    from pf2lora.run.config import from_toml
    from pf2lora.run.first_config import commented_toml

    if out.exists() and not force:
        raise UserError(f"{out} exists already: name another file with --out, or overwrite it with --force")
    found = Questions(settings, asking=sys.stdin.isatty() and not yes).answered()
    write_text(out, commented_toml(found))
    from_toml(out)
    name = shlex.quote(str(out))
    typer.echo(f"\n{out} is written. Next:")
    for command, what in (
        (f"pf2lora train {name} --dry-run", "what it would do and cost, and every problem"),
        (f"pf2lora train {name}", "train, and write adapters and a report"),
        (f"pf2lora compare {name} --method pf2lora homlora local", "does federating help, and which way?"),
    ):
        typer.echo(f"  {command:<58} # {what}")


class Questions:
    """What a run needs to be told: taken from flags, asked, or guessed and said."""

    def __init__(self, settings: dict[str, Any], *, asking: bool) -> None:
        self.settings, self.asking = dict(settings), asking

    def answered(self) -> dict[str, Any]:
        """All settings, by name alone."""
        from pf2lora.run.first_config import first_records, guessed_client_column, guessed_task, likely_model

        clients = self.of(
            "clients", "your data: files, a folder, or a pattern such as data/*.csv", check=paths
        )
        self.settings["clients"] = clients = words(clients)
        guess = self.settings.get("task") or guessed_task(clients)
        name = self.of("task", f"the task ({', '.join(TASKS.own)})", guess, check=known_task)
        task = TASKS[name]()
        records, files = first_records(task, clients)
        typer.echo(f"{files} file{'s' if files > 1 else ''}; {records[0].file} has {len(records)} rows:")
        for column, value in records[0].values.items():
            typer.echo(f"  {one_line(column)}: {shortened(value)}")
        if files == 1:
            line = "the column that names each row's client"
            self.of("client_column", line, guessed_client_column(records, files), check=column_of(records))
        self.columns(task, records)
        named = {n: self.settings[n] for n in column_settings(type(task)) if n in self.settings}
        model = likely_model(replace(task, **named), records)
        self.of("model", "the base model: a hub name or a folder", model)
        self.of("device", "the device (auto, cpu, cuda or cuda:N)", "auto", check=known_device)
        return self.settings

    def columns(self, task: Any, records: list[Any]) -> None:
        """The task's columns, as guessed from those that were named."""
        from pf2lora.run.first_config import guessed_columns, in_every_file

        names = column_settings(type(task))
        besides = [c for c in (self.settings.get("client_column"),) if c]
        while True:
            named = {name: self.settings[name] for name in names if name in self.settings}
            try:
                found = guessed_columns(replace(task, **named), records, besides)
            except UserError as error:
                if not self.asking:
                    raise
                typer.echo(f"  {one_line(error)}")
                self.settings = {k: v for k, v in self.settings.items() if k not in names}
                found = {}
            if found and not named and not in_every_file(task, found, self.settings["clients"]):
                typer.echo("files have columns of their own, which are found by their names")
                return
            for name in names:
                if name in found or (not found and name not in ("pair", "messages")):
                    self.of(name, f"the column of the {name}", found.get(name), check=column_of(records))
            if found:
                return

    def of(
        self, name: str, question: str, guess: str | None = None, check: Callable[[str], Any] | None = None
    ) -> Any:
        """The setting, from its flag, asked until it can be used, or guessed."""
        flag = "--" + name.replace("_", "-")
        if name not in self.settings and self.asking:
            while True:
                given = typer.prompt(question, default=guess, type=str).strip()
                try:
                    if check is not None:
                        check(given)
                    self.settings[name] = given
                    break
                except UserError as error:
                    typer.echo(f"  {one_line(error)}")
        elif name not in self.settings and guess is not None:
            typer.echo(f"{flag} {one_line(guess)} (a guess)")
            self.settings[name] = guess
        elif name not in self.settings:
            raise UserError(f"{flag} is missing: {question}")
        elif check is not None:
            check(self.settings[name])
        return self.settings[name]


def words(clients: str | list[str]) -> list[str]:
    """Paths as they were typed in one line; flags give a list."""
    return shlex.split(clients) if isinstance(clients, str) else list(clients)


def paths(clients: str | list[str]) -> None:
    """There must be files, and the first must be readable as some kind of data."""
    from pf2lora.data.files import expand_paths

    try:
        named = words(clients)
    except ValueError as error:
        raise UserError(f"{clients}: {error}") from None
    files = expand_paths(named)
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        hint = "" if any(map(glob.has_magic, named)) else " (a pattern such as data/*.csv takes several)"
        raise UserError(f"{missing[0] if missing else 'nothing'}: no such file{hint}")


def known_task(name: str) -> None:
    TASKS.check(name)


def known_device(name: str) -> None:
    if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda", "cuda:0"))


def column_of(records: list[Any]) -> Callable[[str], str]:
    from pf2lora.data.files import columns_of, require_column

    return lambda name: require_column(name, columns_of(records), records[0].file)


def shortened(value: Any) -> str:
    text = one_line(value if isinstance(value, str) else repr(value))
    return text if len(text) <= EXAMPLE else text[: EXAMPLE - 1] + "…"


def _given() -> list[Any]:
    columns = {name for task in TASKS.own for name in column_settings(TASKS[task])}
    known = choices() | task_choices()
    return [known[name] for name in (*GIVEN, *(name for name in task_choices() if name in columns))]


init_command = with_settings(init, _given())
