"""What a user should know of the clients' rows before they are trained on: each finding a line, none an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pf2lora.data.client import Client

MANY = 0.05  # a few rows that occur twice are in most data; more than this share were put on both sides
REPEATED = 2  # times that a batch may hold a client's every row before it is worth a word


def seen_before(clients: Sequence[Client[Any]]) -> list[str]:
    """A line where clients are tested, or choose, by rows that they train on."""
    found = []
    for part, what in (("test", "tested on"), ("validation", "to choose by")):
        shared = []
        for client in clients:
            trained, held = set(map(content, client.train)), getattr(client, part)
            again = sum(content(row) in trained for row in held)
            if again > MANY * len(held):
                shared.append((client.name, again, len(held)))
        if shared:
            name, again, of = shared[0]
            others = f", and {len(shared) - 1} more clients" if len(shared) > 1 else ""
            found.append(
                f"rows to train on are {what}, too: {again} of {of} {part} rows of client {name!r}{others}; such a "
                f"score tells what was remembered"
            )
    return found


def content(row: Any) -> int:
    """The same for rows that say the same, whatever they are called."""
    return hash(repr(replace(row, id="") if hasattr(row, "id") else row))


def few_rows(clients: Sequence[Client[Any]], batch_size: int) -> list[str]:
    """A line where a batch is far larger than a client's rows, which it then holds several times over."""
    small = [client for client in clients if batch_size > REPEATED * len(client.train)]
    if not small:
        return []
    least = min(small, key=lambda client: len(client.train))
    others = f", and {len(small) - 1} more clients have too few" if len(small) > 1 else ""
    return [
        f"--batch-size {batch_size} is far above the {len(least.train)} training rows of client {least.name!r}, "
        f"which a batch repeats{others}; a smaller one does the same in less time"
    ]
