"""Options made from the settings themselves: every command that describes a run, or its data, takes the same ones."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pf2lora.data.files import READERS, kind_of
from pf2lora.data.settings import PANELS as DATA_PANELS
from pf2lora.errors import UserError
from pf2lora.run import config as configs
from pf2lora.run.config import DEFAULT_TASK, Config
from pf2lora.settings import column_settings, is_word, settings_of, types_of
from pf2lora.tasks import TASKS
from pf2lora.tasks.settings import TaskSettings


def path_to_write(text: str | Path) -> Path:
    """A file or folder to write, as the user named it. An empty name, such as a shell's unset variable, would be the
    current folder."""
    if not str(text).strip():
        raise UserError(
            "an empty name for what is written, such as --out '': name it ('.' is the current folder)"
        )
    return Path(text)


WRITTEN: dict[str, Any] = {"parser": path_to_write, "metavar": "PATH"}
"""For every option that names what is written."""

EVERYDAY, TRAINING, TASK = "Everyday", "Method and training", "Task"
SHORTER = {"hypergradient_mode": "--hypergradient"}
OWN = ("out",)  # commands have options of their own for these


@dataclasses.dataclass(frozen=True)
class Choice:
    """A setting as the command line shows it."""

    name: str
    kind: Any
    help: str
    panel: str

    @property
    def flags(self) -> list[str]:
        long = "--" + self.name.replace("_", "-")
        if self.kind in (bool, bool | None):
            return [f"{long}/--no-{long[2:]}"]
        return [SHORTER[self.name], long] if self.name in SHORTER else [long]

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    def parameter(self) -> inspect.Parameter:
        """None means "not given", so that a TOML file's value stands."""
        option = typer.Option(*self.flags, help=self.help, rich_help_panel=self.panel, show_default=False)
        kind = list[str] | None if self.is_list else self.kind | None
        if any(is_word(option) for option in typing.get_args(self.kind)):
            kind = str | None  # a number or a word: `settings.convert` tells them apart
        return parameter(self.name, Annotated[kind, option])


@cache
def choices() -> dict[str, Choice]:
    """Every setting of a run, those that most users set first."""
    found: dict[str, Choice] = {}
    for table, kind in configs.TABLES.items():
        types = types_of(kind)
        for name, field in settings_of(kind).items():
            flat = table if name == "name" else name
            panel = DATA_PANELS.get(name, TRAINING) if table == "data" else TRAINING
            panel = EVERYDAY if field.metadata["everyday"] else panel
            text = sets_help() if name == "dataset" else field.metadata["help"]
            found[flat] = Choice(flat, types[name], text + default_hint([("", field.default)]), panel)
    found |= task_choices()
    return dict(sorted(found.items(), key=lambda item: item[1].panel != EVERYDAY))


@cache
def task_choices() -> dict[str, Choice]:
    """Our tasks' own settings; one that several tasks have is one flag, with each task's default. Another package's
    task is not imported for this: its settings are those of ours that are called alike, and the TOML table [task]."""
    names = ", ".join(TASKS)
    default = DEFAULT_TASK.name
    found = {
        "task": Choice(
            "task", str, f"{names}, or package.module:Class{default_hint([('', default)])}", EVERYDAY
        )
    }
    owners: dict[str, list[str]] = {}
    for task in TASKS.own:
        for name in settings_of(TASKS[task]):
            owners.setdefault(name, []).append(task)
    for name, tasks in owners.items():
        field = settings_of(TASKS[tasks[0]])[name]
        defaults = [
            (task if len(tasks) > 1 else "", settings_of(TASKS[task])[name].default) for task in tasks
        ]
        panel = tasks[0].replace("-", " ").capitalize() if len(tasks) == 1 else TASK
        text = field.metadata["help"] + default_hint(defaults)
        found[name] = Choice(name, types_of(TASKS[tasks[0]])[name], text, panel)
    return found


def default_hint(defaults: Iterable[tuple[str, Any]]) -> str:
    """` (default: 128)`, or each owner's where they differ; nothing where the default is nothing."""
    shown = [
        (owner, ", ".join(value) if isinstance(value, tuple) else value)
        for owner, value in defaults
        if value not in ("", None, ())
    ]
    text = ", ".join(f"{owner} {value}".strip() for owner, value in shown)
    return f" [dim](default: {text})[/dim]" if text else ""


def sets_help() -> str:
    """The data sets that tasks know by name."""
    known = [f"{', '.join(TASKS[task].datasets)} ({task})" for task in TASKS.own if TASKS[task].datasets]
    return "; ".join(known)


def parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


FILE_ARGUMENT = inspect.Parameter(
    "file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None, typer.Argument(help="A TOML file with any of these settings; flags win.")
    ],
)


def configured(command: Callable[..., None], **defaults: str) -> Callable[..., None]:
    """Give a command every option of a run. It gets `settings` (what was given, by name) and `file`, a TOML file that
    may be given as the argument; `command(settings, file, **its own options)`. `defaults` say what a setting is where
    the command has a default of its own."""
    given = [c for c in choices().values() if c.name not in OWN]
    given = [
        dataclasses.replace(c, help=c.help.partition(" [dim]")[0] + default_hint([("", defaults[c.name])]))
        if c.name in defaults
        else c
        for c in given
    ]
    return with_settings(command, given, FILE_ARGUMENT)


def described(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that describe data, and the model that sees it: `command(settings, file, **its own
    options)`."""
    names = {*settings_of(configs.TABLES["data"]), *task_choices(), "seed", "model"}
    return with_settings(command, [c for c in choices().values() if c.name in names], FILE_ARGUMENT)


def columned(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that reads one more file for a run the options that name its columns: `command(settings, …)`."""
    names = {name for task in TASKS.own for name in column_settings(TASKS[task])}
    return with_settings(command, [c for c in task_choices().values() if c.name in names])


def with_columns(task: TaskSettings[Any], columns: dict[str, str]) -> TaskSettings[Any]:
    """The run's task, which reads these columns of a file."""
    known = column_settings(type(task))
    for name in columns:
        if name not in known:
            flags = ", ".join(f"--{other}" for other in known) or "none"
            raise UserError(f"--{name} is not for {task.name}, whose columns are named by {flags}")
    return dataclasses.replace(task, **columns)


def with_settings(
    command: Callable[..., None], given: list[Choice], *first: inspect.Parameter
) -> Callable[..., None]:
    """The command with an option for each choice, whose values it gets together as `settings`."""
    hints = typing.get_type_hints(command, include_extras=True)
    taken = {"settings", *(p.name for p in first)}
    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, p in inspect.signature(command).parameters.items()
        if name not in taken
    ]

    def wrapper(**values: Any) -> None:
        found = {c.name: values.pop(c.name) for c in given}
        settings = {name: value for name, value in found.items() if value not in (None, [], ())}
        command(settings, *(values.pop(p.name) for p in first), **values)

    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    signature = inspect.Signature([*first, *(c.parameter() for c in given), *own])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapper


def read_config(settings: dict[str, Any], file: Path | None) -> Config:
    """The config of a file and flags."""
    if file is None:
        return configs.from_settings(settings, "command line")
    if kind_of(file) in READERS:
        raise UserError(f"{file}: a run file ends with .toml; files of rows stand behind --clients")
    written = configs.read_toml(file)
    task = written.get("task", {})
    named = {"task": task["name"]} if isinstance(task, dict) and "name" in task else {}
    over = configs.in_tables(named | settings, "command line")
    return configs.from_dict(configs.merged(written, over), str(file))


# --- lists -------------------------------------------------------------------------------------------------


def spread_lists(args: list[str], lists: set[str]) -> list[str]:
    """`--clients a b c` as `--clients a --clients b --clients c`: what a shell makes of an unquoted glob.

    A list ends at the next option, or at a config file (`run.toml`).
    """
    spread: list[str] = []
    flag: str | None = None
    for arg in args:
        if arg.startswith("-") or arg.endswith(".toml"):
            flag = arg if arg in lists else None
            spread += [] if flag else [arg]
        else:
            spread += [flag, arg] if flag else [arg]
    return spread


class ListCommand(TyperCommand):
    """A command whose list options take several values each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {flag for c in choices().values() if c.is_list for flag in c.flags}
        return super().parse_args(ctx, spread_lists(args, lists))
