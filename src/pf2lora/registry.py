"""Names for classes: a literal dict of our own, and doors for other people's.

A name is one of ours, one that an installed package declares (an entry point), or `package.module:Class`. What a name
stands for is imported when it is asked for: a list of names costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from pf2lora.errors import UserError, one_line, shown, unknown

T = TypeVar("T")


class Registry(Mapping[str, type[T]], Generic[T]):
    """`what` is what the names are of ("method"), `own` maps each of our names to `module:Class`, `base` is the
    class that all of them extend, and installed packages add theirs in the entry point group `pf2lora.<what>s`. Every
    class says its own `name`. `other_names` says what we call what others call differently."""

    def __init__(
        self, what: str, own: Mapping[str, str], base: str, other_names: Mapping[str, str] | None = None
    ) -> None:
        self.what, self.own, self.base, self.other_names = what, dict(own), base, dict(other_names or {})

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """What other packages declare; ours come first."""
        found = entry_points(group=f"pf2lora.{self.what}s")
        return {entry.name: entry for entry in found if entry.name not in self.own}

    def __iter__(self) -> Iterator[str]:
        return iter([*self.own, *self.installed])

    def __len__(self) -> int:
        return len(self.own) + len(self.installed)

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.installed

    def __getitem__(self, name: str) -> type[T]:
        """The class of a name; `module:Class` is imported."""
        if name in self.own:
            return self.imported(self.own[name])
        if name in self.installed:
            return self.imported(self.installed[name].value)
        if ":" in name:
            return self.imported(name)
        raise self.error(name)

    def check(self, name: str) -> None:
        """Raise a UserError for what cannot be a name, without importing anything."""
        if name not in self and ":" not in name:
            raise self.error(name)

    def error(self, name: str) -> UserError:
        if name.lower() in self.other_names:
            return UserError(f"unknown {self.what} {name!r}; here that is {self.other_names[name.lower()]}")
        return UserError(f"{unknown(self.what, name, self)}; another package's is package.module:Class")

    def imported(self, path: str) -> type[T]:
        module, _, attribute = path.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except Exception as error:  # whatever a module does when it is imported
            raise UserError(f"the {self.what} {shown(path)} cannot be imported: {one_line(error)}") from error
        if not isinstance(found, type) or not isinstance(getattr(found, "name", None), str):
            raise UserError(f"{shown(path)} is no {self.what}: a class with a `name` is needed")
        home, _, base = self.base.partition(":")
        if path not in self.own.values() and not issubclass(found, getattr(import_module(home), base)):
            raise UserError(
                f"{shown(path)} is no {self.what}: it does not extend {self.base.replace(':', '.')}"
            )
        return found

    def name_of(self, given: str | type[T]) -> str:
        """The name under which a class can be had again: ours, an installed package's, or `module:Class`."""
        if isinstance(given, str):
            return given
        path = f"{given.__module__}:{given.__qualname__}"
        declared = self.own | {name: entry.value for name, entry in self.installed.items()}
        for name, place in declared.items():
            if place == path:
                return name
        if getattr(sys.modules.get(given.__module__), given.__qualname__, None) is not given:
            raise UserError(
                f"the {self.what} {path!r} must be defined at the top of a module, to be found again"
            )
        return path
