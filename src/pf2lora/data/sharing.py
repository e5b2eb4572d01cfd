"""Pooled rows shared out among clients, by the rule that the user or the data set names.

Train and test go by the same rule, so that a client is tested on its own distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pf2lora.data import partition
from pf2lora.data.client import Client, Pool, check_apart, check_name
from pf2lora.data.files import Record, columns_of, natural_order, require_column
from pf2lora.data.settings import DataSettings
from pf2lora.data.split import MINIMUM_ROWS
from pf2lora.errors import UserError

Row = TypeVar("Row")
Rule = Callable[[Sequence[str]], partition.Parts]


@dataclass(frozen=True)
class Keys:
    """What decides who gets a row: its label, topic or value of a column; `order` is the order they are laid out in."""

    train: list[str]
    test: list[str]
    order: list[str]


def share_out(pool: Pool[Row], key: Callable[[Row], str], data: DataSettings, seed: int) -> list[Client[Row]]:
    """The clients; `data` has its partition, number of clients and heterogeneity filled in."""
    keys = keys_of(pool, key, data.partition_column)
    names, rule = PARTITIONS[data.partition or ""](keys, data, seed)
    for name in names:
        check_name(name, "partition")
    check_apart(names, "partition")
    parts = _parts(rule, keys.train, "training rows"), _parts(rule, keys.test, "test rows")
    for name, train, test in zip(names, *parts):
        if len(train) + len(test) < MINIMUM_ROWS:
            raise UserError(
                f"client {name!r} would get {len(train)} training and {len(test)} test rows; at least "
                f"{MINIMUM_ROWS} are needed: fewer clients, more rows or a more even partition"
            )
    return partition.make_clients(pool.train, pool.test, *parts, names)


def keys_of(pool: Pool[Row], key: Callable[[Row], str], column: str | None) -> Keys:
    """Each row's key: the task's own, or the value of a column."""
    if column is None:
        train, test = [key(row) for row in pool.train], [key(row) for row in pool.test]
    else:
        train, test = (_values(records, column) for records in (pool.train_records, pool.test_records))
    return Keys(train, test, list(pool.order or natural_order([*train, *test])))


def _values(records: list[Record] | None, column: str) -> list[str]:
    if not records:
        raise UserError(f"--partition-column {column}: these rows come without columns to go by")
    require_column(column, columns_of(records), records[0].file, "--partition-column")
    return [record.name(column) for record in records]


def _parts(rule: Rule, keys: Sequence[str], which: str) -> partition.Parts:
    try:
        return rule(keys)
    except UserError as error:
        raise UserError(f"{which}: {error}") from None


def _heterogeneity(keys: Keys, data: DataSettings, seed: int) -> tuple[list[str], Rule]:
    assert data.num_clients is not None and data.heterogeneity is not None
    clients, h = data.num_clients, data.heterogeneity
    sizes = partition.uneven_sizes(clients, data.size_ratio, seed)

    def rule(values: Sequence[str]) -> partition.Parts:
        return partition.by_heterogeneity(values, clients, h, seed, sizes, keys.order)

    return partition.client_names(clients), rule


def _dirichlet(keys: Keys, data: DataSettings, seed: int) -> tuple[list[str], Rule]:
    assert data.num_clients is not None
    clients = data.num_clients

    def rule(values: Sequence[str]) -> partition.Parts:
        return partition.by_dirichlet(values, clients, data.dirichlet_alpha, seed)

    return partition.client_names(clients), rule


def _column(keys: Keys, data: DataSettings, seed: int) -> tuple[list[str], Rule]:
    groups = partition.column_groups(keys.train, data.num_clients)
    return list(groups), lambda values: partition.by_groups(values, groups)


def _groups(keys: Keys, data: DataSettings, seed: int) -> tuple[list[str], Rule]:
    groups = parse_groups(data.groups)
    return list(groups), lambda values: partition.by_groups(values, groups)


def _even_groups(keys: Keys, data: DataSettings, seed: int) -> tuple[list[str], Rule]:
    assert data.num_clients is not None
    groups = covered_groups(keys.train, keys.test, data.num_clients)
    return list(groups), lambda values: partition.by_groups(values, groups)


PARTITIONS: dict[str, Callable[[Keys, DataSettings, int], tuple[list[str], Rule]]] = {
    "heterogeneity": _heterogeneity,
    "dirichlet": _dirichlet,
    "column": _column,
    "groups": _groups,
    "even-groups": _even_groups,
}


def parse_groups(groups: Sequence[str]) -> dict[str, list[str]]:
    """{"sports": ["football", "tennis"]} from "sports=football,tennis"."""
    parsed: dict[str, list[str]] = {}
    for group in groups:
        name, _, members = group.partition("=")
        values = [value.strip() for value in members.split(",") if value.strip()]
        if not name.strip() or not values:
            raise UserError(f"{group!r} is not a group: write name=value,value")
        if name.strip() in parsed:
            raise UserError(f"two groups are named {name.strip()!r}")
        parsed[name.strip()] = values
    return parsed


def covered_groups(train: Sequence[str], test: Sequence[str], clients: int) -> dict[str, list[str]]:
    """Whole groups of values (restaurants, categories), one set per client, of similar numbers of training rows, such
    that every client has test rows and has seen all of their values in training."""
    unseen = sorted(set(test) - set(train))
    if unseen:
        raise UserError(f"the test rows of {unseen[0]!r} have no training rows")
    counts, tested = Counter(train), set(test)
    groups = partition.column_groups([value for value in train if value in tested], clients)
    sizes = {name: sum(counts[value] for value in members) for name, members in groups.items()}
    for value in sorted(counts.keys() - tested, key=lambda value: (-counts[value], value)):
        smallest = min(sizes, key=lambda name: sizes[name])
        groups[smallest].append(value)
        sizes[smallest] += counts[value]
    return groups


def describe(data: DataSettings, titles: dict[str, Any]) -> str:
    """The data in a few words, for a title; `titles` are those of the data sets, by name."""
    if data.dataset is None and data.partition is None and data.client_column is None:
        return "one file per client"
    source = titles.get(data.dataset, data.dataset) if data.dataset else "pooled files"
    rules = {
        "heterogeneity": f"heterogeneity {data.heterogeneity:g}" if data.heterogeneity is not None else "",
        "dirichlet": f"Dirichlet({data.dirichlet_alpha:g})",
        "column": f"by column {data.partition_column}",
        "groups": f"groups of {data.partition_column}",
        "even-groups": "whole groups of rows",
        "client column": f"by column {data.client_column}",
    }
    return f"{source}, {rules[data.partition or 'client column']}"
