"""Rows that are in memory, from Python: lists of dicts, data frames, `datasets`, none of which is imported here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pf2lora.data.client import check_apart, check_name
from pf2lora.data.files import Record
from pf2lora.errors import UserError, shown

PARTS = ("clients", "test", "validation")
PLACE = "memory:"  # before a client's name, where a config would name its file
ALL = "rows"  # one table of all clients, whose names are in a column

Tables = Mapping[str, Mapping[str, list[Record]]]
"""The records of each part by client, where they are in memory."""


def is_in_memory(value: Any) -> bool:
    """Whether these are rows, and no names of files."""
    if isinstance(value, str | Path):
        return False
    if isinstance(value, Mapping) or is_table(value):
        return True
    return isinstance(value, Iterable) and any(not isinstance(item, str | Path) for item in value)


def is_table(value: Any) -> bool:
    """Whether this is one table: rows that are dicts, or what knows its columns."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(row, Mapping) for row in value)
    return hasattr(value, "columns") or hasattr(value, "column_names")


def read_tables(part: str, value: Any) -> dict[str, list[Record]]:
    """`{"north": rows, "south": rows}`, or one table of all, as records that know their place."""
    named = value if isinstance(value, Mapping) else {ALL: value}
    found = {}
    for name, table in named.items():
        where = f"{part}[{name!r}]" if isinstance(value, Mapping) else part
        if not isinstance(name, str):
            raise UserError(f"{part}: {shown(name)} cannot name a client: give names, as texts")
        if not is_table(table):
            raise UserError(
                f"{where}: {type(table).__name__} is no table: give rows as dicts, a DataFrame or a Dataset, and "
                f"several of them as {{'north': …, 'south': …}}"
            )
        check_name(name, part)
        records = [Record(row, where, f"row {number}") for number, row in enumerate(rows_of(table), 1)]
        if not records:
            raise UserError(f"{where}: no rows")
        found[name] = records
    check_apart(found, part)
    return found


def rows_of(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of a table, with values as a file would hold them."""
    features = getattr(table, "features", None) or {}
    names = {column: getattr(feature, "names", None) for column, feature in dict(features).items()}
    if hasattr(table, "to_dicts"):  # polars
        rows: Iterable[Any] = table.to_dicts()
    elif hasattr(table, "columns") and hasattr(table, "to_dict"):  # pandas
        rows = table.to_dict("records")
    else:
        rows = table
    for row in rows:
        yield {str(column): plain(value, names.get(column)) for column, value in row.items()}


def plain(value: Any, names: list[str] | None = None) -> Any:
    """A number of numpy as Python's, an array as a list, and a class of `datasets` as its name."""
    if hasattr(value, "tolist") and not isinstance(value, str | bytes):
        value = value.tolist()
    if names and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    return value


def named_places(tables: Mapping[str, list[Record]]) -> list[str]:
    """What a config says of them."""
    return [f"{PLACE}{name}" for name in tables]
