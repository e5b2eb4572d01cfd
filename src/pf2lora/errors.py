"""What a user did wrong, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Input that cannot be used. The message is one line: what is wrong, where, and what would be right.

    The command line prints it and exits with code 2; from Python it is an ordinary exception.
    """


class UnknownLabel(UserError):
    """A row with a label that nobody trains on, or that a federation does not name."""


def unknown(what: str, name: str, valid: Iterable[str]) -> UserError:
    """An error for a name that is not one of `valid`, with the nearest valid name."""
    names = list(valid)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {what} {name!r}{hint} (valid: {', '.join(names)})")


def missing_extra(package: str, extra: str, purpose: str) -> UserError:
    """An error for an optional package that is not installed, naming the extra that brings it."""
    return UserError(f"{purpose} needs the package {package!r}: pip install 'pf2lora[{extra}]'")
