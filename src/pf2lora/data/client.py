"""What a client holds, which never leaves it; and whose rows are whose: one file per client, or a column that says."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pf2lora.data.files import Record, columns_of, name_of, natural_order, read_records, require_column
from pf2lora.errors import UserError, shown

Row = TypeVar("Row", covariant=True)
LONGEST_NAME = (
    200  # bytes; a file system takes 255, of which its file's ending and a temporary name need some
)


@dataclass(frozen=True)
class Client(Generic[Row]):
    """One client's data. `train` is what it learns from, `test` what it is measured on, and `validation` what it
    chooses by: it is neither learned from nor counted in a score."""

    name: str
    train: list[Row]
    test: list[Row]
    validation: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Pool(Generic[Row]):
    """Rows of no client yet, the records they were made from where those are known, and the order of the keys (labels,
    topics) that they are laid out by."""

    train: list[Row]
    test: list[Row]
    train_records: list[Record] | None = None
    test_records: list[Record] | None = None
    order: tuple[str, ...] | None = None


def check_name(name: str, where: str | Path) -> str:
    """A client's name, which must serve as a folder's name on any system: its adapter is written to clients/<name>/."""
    if why := why_no_folder(name):
        raise UserError(f"{where}: {shown(name)} cannot name a client: it cannot be a folder's name ({why})")
    return name


def why_no_folder(name: str) -> str:
    """Why a folder cannot be called so; nothing where it can."""
    if not name.strip(". "):
        return "nothing but dots and blanks"
    if bad := [c for c in name if c in '/\\:*?"<>|' or not c.isprintable()]:
        return f"it holds {bad[0]!r}"
    if name != name.strip() or name.endswith("."):
        return "a blank or a dot at its end, or a blank before it"
    if name.startswith("."):
        return "it would be hidden"
    if len(name.encode("utf8")) > LONGEST_NAME:
        return f"longer than {LONGEST_NAME} bytes"
    if re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name):
        return "Windows keeps it for a device"
    return ""


def check_apart(names: Iterable[str], where: str | Path) -> None:
    """No two names that some file system takes for one: they differ in case, or in how Unicode spells a letter."""
    seen: dict[str, str] = {}
    for name in names:
        same = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if same in seen:
            raise UserError(
                f"{where}: the clients {seen[same]!r} and {name!r} would share a folder on some systems: rename one"
            )
        seen[same] = name


def records_per_client(
    paths: Sequence[Path],
    client_column: str | None,
    read: Callable[[Path], list[Record]] = read_records,
) -> dict[str, list[Record]]:
    """Each client's records: named by the column if there is one, else by the file's name without suffix.

    `read` gives a file's records; a task may know formats of its own.
    """
    if client_column is not None:
        return by_column([(path, read(path)) for path in paths], client_column)
    clients: dict[str, list[Record]] = {}
    files: dict[str, Path] = {}
    for path in paths:
        name = check_name(name_of(path), path)
        if name in files:
            raise UserError(f"{files[name]} and {path} would both be client {name!r}: rename one of them")
        files[name] = path
        clients[name] = read(path)
    check_apart(clients, "--clients")
    return clients


def by_column(tables: Sequence[tuple[Path | str, list[Record]]], column: str) -> dict[str, list[Record]]:
    """Each client's records of some files, by the column that names it."""
    clients: dict[str, list[Record]] = {}
    for path, records in tables:
        require_column(column, columns_of(records), path, "--client-column")
        for record in records:
            name = record.name(column)
            if name not in clients:
                clients[check_name(name, record.where)] = []
            clients[name].append(record)
    check_apart(clients, f"--client-column {column}")
    return {name: clients[name] for name in natural_order(clients)}


def check_same_clients(train: Iterable[str], held_out: Iterable[str], part: str = "test") -> None:
    """Separate test or validation data must be there for every client, and for no one else."""
    trained, held = set(train), set(held_out)
    for name in natural_order(trained - held):
        raise UserError(f"client {name!r} has no {part} data (there is some for: {_listed(held)})")
    for name in natural_order(held - trained):
        raise UserError(
            f"client {name!r} has {part} data but nothing to train on (clients: {_listed(trained)})"
        )


def _listed(names: set[str]) -> str:
    ordered = natural_order(names)
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
