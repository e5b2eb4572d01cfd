"""Clients from each one's rows: test rows of their own, or a seeded part of the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pf2lora.data.client import Client
from pf2lora.data.partition import by_groups, column_groups, make_clients
from pf2lora.data.per_client import check_same_clients
from pf2lora.data.split import rng_for, split_rows
from pf2lora.errors import UserError
from pf2lora.tasks.classification.rows import MINIMUM_ROWS

T = TypeVar("T")


def clients_of(
    train: Mapping[str, list[T]], test: Mapping[str, list[T]] | None, test_ratio: float, seed: int
) -> list[Client[T]]:
    """One client per name. Without `test`, a `test_ratio` of each client's rows is held out, by its name."""
    for name, rows in train.items():
        if len(rows) < MINIMUM_ROWS:
            raise UserError(f"client {name!r} has {len(rows)} rows; at least {MINIMUM_ROWS} are needed")
    if test is not None:
        check_same_clients(train, test)
        return [Client(name, rows, test[name]) for name, rows in train.items()]
    return [
        Client(name, *split_rows(rows, [""] * len(rows), test_ratio, rng_for(seed, "split", name)))
        for name, rows in train.items()
    ]


def covered_groups(train: Sequence[str], test: Sequence[str], clients: int) -> dict[str, list[str]]:
    """Groups of values (restaurants, categories), one per client, of similar numbers of training rows, such that
    every client has test rows and has seen all of their values in training."""
    unseen = sorted(set(test) - set(train))
    if unseen:
        raise UserError(f"the test rows of {unseen[0]!r} have no training rows")
    counts, tested = Counter(train), set(test)
    groups = column_groups([value for value in train if value in tested], clients)
    sizes = {name: sum(counts[value] for value in members) for name, members in groups.items()}
    for value in sorted(counts.keys() - tested, key=lambda value: (-counts[value], value)):
        smallest = min(sizes, key=lambda name: sizes[name])
        groups[smallest].append(value)
        sizes[smallest] += counts[value]
    return groups


def clients_by_group(
    train: Sequence[T], test: Sequence[T], key: Callable[[T], str], clients: int
) -> list[Client[T]]:
    """Clients that each get whole groups of rows, the same groups in training and test."""
    seen, asked = [key(row) for row in train], [key(row) for row in test]
    groups = covered_groups(seen, asked, clients)
    return make_clients(train, test, by_groups(seen, groups), by_groups(asked, groups), list(groups))
