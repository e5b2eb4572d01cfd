"""Which column of a user's file is what, by what stands in it: a guess to be shown, never one to train on unseen."""

from __future__ import annotations

from collections.abc import Sequence

from pf2lora.data.files import Record, as_name, columns_of, find_column

CLIENT_COLUMNS = (
    *("client", "client_id", "site", "silo", "party", "hospital", "clinic", "institution", "organization"),
    *("organisation", "branch", "user", "user_id", "domain", "source"),
)
ROWS_PER_VALUE = 5  # a label stands in at least so many rows, on average


def client_column(records: Sequence[Record]) -> str | None:
    """The column that names each row's client, by its name: what stands in it could be anything."""
    return find_column(columns_of(records), CLIENT_COLUMNS)


def longest_texts(records: Sequence[Record], besides: Sequence[str | None] = ()) -> str | None:
    """The column with the longest texts."""
    lengths = {
        name: sum(len(value) for r in records if isinstance(value := r.values.get(name), str))
        for name in columns_of(records)
        if name not in besides
    }
    found = max(lengths, key=lambda name: lengths[name], default=None)
    return found if found is not None and lengths[found] else None


def fewest_values(records: Sequence[Record], besides: Sequence[str | None] = ()) -> str | None:
    """The column with the fewest different values, of those that could be labels: two or more, each in several rows;
    the last one of several, where most files have it."""
    found, fewest = None, len(records) // ROWS_PER_VALUE
    for name in columns_of(records):
        if name in besides:
            continue
        values = {
            as_name(value)
            for r in records
            if isinstance(value := r.values.get(name), str | int | float) and not r.is_missing(name)
        }
        if 2 <= len(values) <= max(fewest, 2):
            found, fewest = name, len(values)
    return found
