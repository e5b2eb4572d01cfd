"""`pf2lora reproduce`: every table and figure of the paper, a command each."""

from __future__ import annotations

import inspect
import shutil
from textwrap import TextWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pf2lora.cli.options import ListCommand
from pf2lora.cli.presets import command_for, command_for_files
from pf2lora.cli.ranks import ranks
from pf2lora.cli.regret import RegretCommand, regret
from pf2lora.cli.synthetic import synthetic, theorem
from pf2lora.errors import unknown
from pf2lora.reproduce.presets import load_preset, preset_names, title_of

FILE = "run-file"  # the command that a path stands for
SMALL = "nothing: minutes on a CPU"
OTHERWISE = {
    "regret": "an encoder, a language model and the data sets of docs/regret.md; a GPU",
    "ranks": "finished runs",
}


class Reproductions(TyperGroup):
    """Its commands are the presets; a path to a TOML file is a preset too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name.endswith(".toml"):
            return FILE, self.commands[FILE], args
        if name not in self.commands:
            raise unknown("reproduction", name, [n for n in self.commands if n != FILE])
        return super().resolve_command(ctx, args)


app = typer.Typer(help="The paper's tables and figures.", no_args_is_help=True, cls=Reproductions)


def print_list() -> None:
    """Each name with what it is, and below it what it needs: as wide as the terminal, wrapped between words, in plain
    letters, so that a pipe gets the same."""
    rows = listed()
    column = max(len(name) for name, *_ in rows) + 2
    width = max(shutil.get_terminal_size().columns, 2 * column)
    wrapped = TextWrapper(
        width, subsequent_indent=" " * column, break_long_words=False, break_on_hyphens=False
    )
    for name, what, place, needs in rows:
        typer.echo(wrapped.fill(f"{name:{column}}{what}{place and f' ({place})'}"))
        typer.echo(wrapped.fill(f"{'':{column}}needs {needs}"))


def listed() -> list[tuple[str, str, str, str]]:
    """Name, title, place in the paper and needs of everything that can be reproduced."""
    found = []
    for command in app.registered_commands:
        name, about = command.name or "", inspect.getdoc(command.callback) or ""
        if name in preset_names():
            preset = load_preset(name)
            place = preset.source.partition(" (")[0]  # the label in the paper's source is in the docs
            found.append((name, preset.title, place, "; ".join(preset.needs)))
        elif name != FILE:
            place, _, what = about.splitlines()[0].rstrip(".").partition(": ")
            what, place = (what[:1].upper() + what[1:], place) if what else (place, "")
            found.append((name, what, place, OTHERWISE.get(name, SMALL)))
    return found


@app.callback(invoke_without_command=True)
def reproduce(
    show: Annotated[
        bool, typer.Option("--list", help="What can be reproduced, and what each needs.")
    ] = False,
) -> None:
    """The paper's tables and figures. [bold]pf2lora reproduce --list[/bold] says what each needs."""
    if show:
        print_list()
        raise typer.Exit


app.command("synthetic")(synthetic)
app.command("theorem")(theorem)
app.command("regret", cls=RegretCommand)(regret)
app.command("ranks")(ranks)
for _name in preset_names():
    app.command(_name, cls=ListCommand, help=title_of(_name))(command_for(_name))
app.command(FILE, cls=ListCommand, hidden=True)(command_for_files())
