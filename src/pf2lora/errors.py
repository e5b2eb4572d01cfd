"""What a user did wrong, or what the system refused a user, in one line."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST = 80  # characters of a foreign value that a message quotes
MOST = 50  # names that a message lists, or looks for a near one among


class UserError(Exception):
    """Input that cannot be used. The message is one line: what is wrong, where, and what would be right.

    The command line prints it and exits with code 2; from Python it is an ordinary exception.
    """


class UnknownLabel(UserError):
    """A row with a label that nobody trains on, or that a federation does not name."""


class CannotWrite(UserError, OSError):
    """The system refused to write: a full disk, no permission. Still an OSError, with its number."""

    def __init__(self, path: str | os.PathLike[str], error: Exception) -> None:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and "os error 28" in reason:  # as safetensors says it
            reason, full = "No space left on device", True
        self.reason = reason
        right = "free some space; " if full else "choose a place where you may write; "
        self.line = f"{os.fspath(path)}: cannot be written ({reason}): {right}what was there is as it was"
        super().__init__(self.line)
        self.errno = errno.ENOSPC if full else getattr(error, "errno", None) or errno.EIO

    def __str__(self) -> str:
        return self.line


@contextmanager
def reading(path: str | os.PathLike[str], what: str = "file") -> Iterator[None]:
    """What the system says while a user's file is read (`what` it is) becomes one line."""
    where = os.fspath(path)
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{where}: no such {what}") from None
    except IsADirectoryError:
        raise UserError(f"{where}: a folder, not a {what}") from None
    except PermissionError:
        raise UserError(f"{where}: this {what} may not be read (no permission)") from None
    except OSError as error:
        raise UserError(f"{where}: this {what} cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise UserError(f"{where}: this {what} needs more memory than there is") from None


def check_path(path: Path) -> Path:
    """The path, if the system could have such a one. (A name that is too long is an OSError.)"""
    if "\0" in str(path):
        raise UserError(f"{shown(str(path))} is no path: it holds a NUL character")
    return path


def shown(value: Any) -> str:
    """A foreign value as a message quotes it: its repr, in one line, cut."""
    if isinstance(value, str | bytes):
        text = repr(value[: LONGEST + 1])
    elif isinstance(value, int) and value.bit_length() > 256:
        return "a number of too many digits"
    else:
        try:
            text = repr(value)
        except (RecursionError, ValueError):  # nested too deep, a number too long to be printed
            text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def listed(names: Iterable[str]) -> str:
    """Names for a message: the first few, each cut."""
    found = list(names)
    parts = [name if len(name) <= LONGEST else name[:LONGEST] + "…" for name in found[:MOST]]
    return ", ".join(parts) + (f" and {len(found) - MOST} more" if len(found) > MOST else "")


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'text'?` where one of `names` is near. Only a few short ones are compared: it is quadratic."""
    few = [other for other in names if len(other) <= LONGEST][: 10 * MOST]
    near = difflib.get_close_matches(name, few, n=1) if len(name) <= LONGEST else []
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(what: str, name: str, valid: Iterable[str]) -> UserError:
    """An error for a name that is not one of `valid`, with the nearest valid name."""
    names = list(valid)
    return UserError(f"unknown {what} {shown(name)}{nearest(name, names)} (valid: {listed(names)})")


def missing_extra(package: str, extra: str, purpose: str) -> UserError:
    """An error for an optional package that is not installed, naming the extra that brings it."""
    return UserError(f"{purpose} needs the package {package!r}: pip install 'pf2lora[{extra}]'")


def one_line(error: BaseException | str) -> str:
    """A message as a terminal may get it: one line, in which nothing steers the terminal."""
    line = " ".join(str(error).split("\n"))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
