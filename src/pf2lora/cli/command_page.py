"""Every command with its own options, made from the commands: the site's page docs/commands.md is filled with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text

from pf2lora.cli import app
from pf2lora.cli.options import choices
from pf2lora.reproduce.presets import preset_names

PRESET = "PRESET"
OF_PRESETS = (
    "A table or figure of the paper, by its [preset](presets.md); or a TOML file, an edited copy of one."
)


def reference() -> str:
    """The commands in Markdown, in the order of `pf2lora --help`."""
    root: Any = typer.main.get_command(app)
    return "\n\n".join(described(path, command) for path, command in commands(root, ("pf2lora",)))


def commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that name it. The presets of `reproduce` are one command here: they differ in name
    alone, and have a page of their own."""
    presets = preset_names() if path[-1] == "reproduce" else []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif presets and name == presets[0]:
            yield (*path, PRESET), command
        elif not command.hidden and name not in presets:
            yield (*path, name), command


def described(path: tuple[str, ...], command: Any) -> str:
    """One command: what it does, its arguments and its own options; the settings of a run have a page of their own."""
    own = [p for p in command.params if not is_setting(p) and p.name != "help"]
    arguments = [p for p in own if p.param_type_name == "argument"]
    usage = " ".join([*path, *map(metavar, arguments), "[OPTIONS]"])
    about = OF_PRESETS if path[-1] == PRESET else plain(command.help)
    parts = [f"## {' '.join(path)}", about, f"```text\n{usage}\n```"]
    rows = [row(p) for p in own]
    if rows:
        parts.append("\n".join(["| | default | |", "| --- | --- | --- |", *rows]))
    settings = [p for p in command.params if is_setting(p)]
    if len(settings) > len(choices()) / 2:
        parts.append("And every [setting](settings.md) of a run as a flag.")
    elif settings:
        flags = ", ".join(f"`{p.opts[0]}`" for p in settings)
        parts.append(f"And these [settings](settings.md): {flags}.")
    return "\n\n".join(parts)


def is_setting(parameter: Any) -> bool:
    """Whether it is a run's setting, as `options.configured` makes them, and not a command's own of that name."""
    return parameter.name in choices() and parameter.help == choices()[parameter.name].help


def metavar(argument: Any) -> str:
    """An argument in a usage line."""
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def row(parameter: Any) -> str:
    """An option or argument in a line of a table."""
    argument = parameter.param_type_name == "argument"
    name = parameter.name.upper() if argument else ", ".join((*parameter.opts, *parameter.secondary_opts))
    default = parameter.default
    empty = default is None or default is False or default == () or callable(default)
    shown = "required" if parameter.required else "" if empty else f"`{default}`"
    return f"| `{name}` | {shown} | {plain(parameter.help).replace('|', '/')} |"


def plain(text: str | None) -> str:
    """Help without its markup, in one line."""
    return " ".join(Text.from_markup(text or "").plain.split())
