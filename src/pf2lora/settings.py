"""Settings that are declared once: flags, TOML tables, checks and docs all come from a dataclass's fields."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from pf2lora.errors import UserError, shown, unknown
from pf2lora.parsing import LARGEST_INTEGER, is_whole


def setting(default: Any, help: str, *, column: bool = False, everyday: bool = False) -> Any:
    """A setting with the one line that `--help` and the docs show.

    `column` marks the name of a data file's column, `everyday` what most users set.
    """
    return dataclasses.field(default=default, metadata={"help": help, "column": column, "everyday": everyday})


def settings_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass that were declared by `setting`, by name."""
    return {f.name: f for f in dataclasses.fields(kind) if "help" in f.metadata}


def column_settings(kind: type) -> list[str]:
    """The settings of a dataclass that name columns of a user's files."""
    return [name for name, field in settings_of(kind).items() if field.metadata["column"]]


def types_of(kind: type) -> dict[str, Any]:
    """The settings of a dataclass with their types."""
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in settings_of(kind)}


def from_table(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A `kind` of checked values; an unknown key is an error with the nearest valid name."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where} must be a table, not {shown(values)}")
    return kind(**checked(types_of(kind), values, where))


def checked(known: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values as the types that `known` gives their names."""
    found = {}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{where}: {unknown('key', key, known)}")
        found[key] = convert(value, known[key], f"{where}: {key}")
    return found


def convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as `kind` (str, int, float, bool, tuple[str, ...], or one of them or None or a word)."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise UserError(f"{where} must be a number below 2^63, not {shown(value)}")
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str) and not is_whole(text):
            raise UserError(f"{where} holds half of a surrogate pair, which is no character: {shown(text)}")
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) or is_union(kind) else (kind,)
    words = [word for option in options if is_word(option) for word in typing.get_args(option)]
    if (value is None and type(None) in options) or (isinstance(value, str) and value in words):
        return value
    wanted = next(option for option in options if option is not type(None) and not is_word(option))
    if words and isinstance(value, str):  # as a flag gives it
        try:
            value = wanted(value)
        except ValueError:
            raise UserError(f"{where} must be a number or {' or '.join(words)}, not {shown(value)}") from None
    if typing.get_origin(wanted) is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise UserError(f"{where} must be a list of strings, not {shown(value)}")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is float and isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} must be a finite number, not {shown(value)}")
    if isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    raise UserError(f"{where} must be of type {wanted.__name__}, not {shown(value)}")


def is_union(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Union


def is_word(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def to_table(values: Any) -> dict[str, Any]:
    """A settings dataclass as TOML has it: tuples are lists, and what is None is left out, as TOML has no null."""
    found = {name: getattr(values, name) for name in settings_of(type(values))}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items() if v is not None}


def require_positive(values: Any, *names: str) -> None:
    """These settings must be above 0, or None."""
    for name in names:
        value = getattr(values, name)
        if value is not None and value <= 0:
            raise UserError(f"{name} is {value}; it must be above 0")


def require_not_negative(values: Any, *names: str) -> None:
    """These settings must be 0 or more."""
    for name in names:
        if getattr(values, name) < 0:
            raise UserError(f"{name} is {getattr(values, name)}; it must be 0 or more")
