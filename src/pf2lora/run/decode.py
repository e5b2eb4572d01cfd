"""Dataclasses from JSON, checked against their own types; what is wrong is named with its place in the file."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from pf2lora.errors import LONGEST, UserError
from pf2lora.parsing import LARGEST_INTEGER

T = TypeVar("T")
WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"}


def decode(kind: type[T], value: Any, file: str, described: str = "") -> T:
    """`value`, as `json` reads it, as the dataclass `kind`; a UserError names the first place that does not fit, and
    where the file is `described`."""
    return typing.cast(T, _Place(file, "", described).decode(kind, value))


_hints = cache(typing.get_type_hints)  # a large result has a thousand records of a kind


class _Place:
    """A place in the file, to be named when what stands there is wrong."""

    def __init__(self, file: str, path: str, described: str) -> None:
        self.file, self.path, self.described = file, path, described

    def inside(self, name: str | int) -> _Place:
        short = name if isinstance(name, int) or len(name) <= LONGEST else name[:LONGEST] + "…"
        joined = f"[{name}]" if isinstance(name, int) else f".{short}" if self.path else str(short)
        return _Place(self.file, self.path + joined, self.described)

    def fail(self, right: str, value: Any) -> UserError:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        found = shown if len(shown) <= 40 else shown[:39] + "…"
        return UserError(f"{self.file}: {self.path or 'the file'} must be {right}, not {found}")

    def decode(self, kind: Any, value: Any) -> Any:
        if kind is Any:
            return value
        if isinstance(kind, types.UnionType):
            (wanted,) = (option for option in typing.get_args(kind) if option is not type(None))
            return None if value is None else self.decode(wanted, value)
        origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin in (list, tuple):
            if not isinstance(value, list):
                raise self.fail("a list", value)
            return origin(self.inside(i).decode(arguments[0], item) for i, item in enumerate(value))
        if origin in (dict, Mapping) or is_dataclass(kind):
            if not isinstance(value, dict):
                raise self.fail("an object", value)
            return self.record(kind, value) if is_dataclass(kind) else self.mapping(arguments, value)
        return self.plain(kind, value)

    def mapping(self, arguments: tuple[Any, ...], value: dict[str, Any]) -> dict[str, Any]:
        kind = arguments[1] if arguments else Any
        return {name: self.inside(name).decode(kind, item) for name, item in value.items()}

    def record(self, kind: Any, value: dict[str, Any]) -> Any:
        hints, found = _hints(kind), {}
        for f in fields(kind):
            if f.name in value:
                found[f.name] = self.inside(f.name).decode(hints[f.name], value[f.name])
            elif f.default is MISSING and f.default_factory is MISSING:
                hint = f" ({self.described} describes the file)" if self.described else ""
                raise UserError(f"{self.file}: {self.inside(f.name).path} is missing{hint}")
        return kind(**found)

    def plain(self, kind: type, value: Any) -> Any:
        allowed = (int, float) if kind is float else (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(WORDS[kind], value)
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise self.fail("a number below 2^63", value)
        return value
