"""Every command that describes a run takes the same options, made from the config's own settings."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pf2lora.cli import data as data_options
from pf2lora.data.spec import DataSpec
from pf2lora.run import config as configs
from pf2lora.run.config import Config

EVERYDAY: tuple[str, ...] = (
    "model",
    "method",
    "rounds",
    "steps",
    "batch_size",
    "rank",
    "client_rank",
    "lr",
    "client_lr",
)
EVERYDAY += ("seed", "seeds", "device", "precision")
PANELS = dict.fromkeys(("stride", "max_answer_tokens", "no_answer_threshold"), "Question answering")
PANELS |= dict.fromkeys(
    ("beams", "length_penalty", "no_repeat_ngram", "max_new_tokens", "separator"), "Generation"
)
COLUMNS = {
    "context": "Question answering",
    "question": "Question answering",
    "answers": "Question answering",
    "prompt": "Generation",
    "target": "Generation",
}
OWN = ("out",)  # commands have options of their own for these


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def config_options() -> list[inspect.Parameter]:
    """An option for every setting; None means "not given", so that a TOML file's value stands."""
    types = configs.option_types(Config)
    fields = {f.name: f for f in dataclasses.fields(Config) if f.name in types}
    order = [*EVERYDAY, *(name for name in fields if name not in EVERYDAY + OWN)]
    found = []
    for name in order:
        default = fields[name].default
        kind = types[name]
        kind = list[str] | None if typing.get_origin(kind) is tuple else kind | None
        shown = ", ".join(default) if isinstance(default, tuple) else default
        hint = f" [dim](default: {shown})[/dim]" if shown not in ("", None) else ""
        panel = PANELS.get(name, "Everyday" if name in EVERYDAY else "Method and training")
        spelling = f"{flag(name)}/--no-{flag(name)[2:]}" if types[name] is bool else flag(name)
        option = typer.Option(
            spelling, help=fields[name].metadata["help"] + hint, rich_help_panel=panel, show_default=False
        )
        found.append(parameter(name, Annotated[kind, option]))
    return found


def data_parameters() -> list[inspect.Parameter]:
    """The options of the data, as `pf2lora data show` takes them."""
    shown = inspect.signature(data_options.show).parameters
    hints = typing.get_type_hints(data_options.show, include_extras=True)
    found = []
    for name in configs.option_types(DataSpec):
        if name in shown:
            kind, option = typing.get_args(hints[name])[:2]
            option.show_default = False
            found.append(parameter(name, Annotated[kind | None, option]))
        elif name in COLUMNS:
            option = typer.Option(
                flag(name), help=f"Column of the {name} (guessed).", rich_help_panel=COLUMNS[name]
            )
            found.append(parameter(name, Annotated[str | None, option]))
    return found


def parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of a run. It gets `settings`: what was given, as nested values.

    A `.toml` file may be given as the argument; `command(settings, file, **its own options)`.
    """
    run_options = {p.name: p for p in [*config_options(), *data_parameters()]}
    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
        for name, p in inspect.signature(command).parameters.items()
        if name not in ("settings", "file")
        for hint in [typing.get_type_hints(command, include_extras=True)[name]]
    ]
    data_names = set(configs.option_types(DataSpec))
    file_hint = Annotated[
        Path | None, typer.Argument(help="A TOML file with any of these settings; flags win.")
    ]

    def wrapper(**given: Any) -> None:
        settings: dict[str, Any] = {}
        for name in run_options:
            value = given.pop(name)
            if value not in (None, [], ()):
                table = settings.setdefault("data", {}) if name in data_names else settings
                table[name] = value
        command(settings, given.pop("file"), **given)

    wrapper.__doc__ = command.__doc__
    wrapper.__name__ = command.__name__
    file = inspect.Parameter("file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file_hint)
    signature = inspect.Signature([file, *run_options.values(), *own])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapper


def read_config(settings: dict[str, Any], file: Path | None) -> Config:
    """The config of a file and flags."""
    if file is None:
        return configs.from_dict(settings, "command line")
    return configs.from_toml(file, settings)
