"""What the data of a run is: where it comes from and how it is shared out among clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pf2lora.data import partition
from pf2lora.data.client import Client, TextRow
from pf2lora.data.embedded import LABELS, MOVIE_REVIEWS, movie_reviews
from pf2lora.data.files import Record, columns_of, expand_paths, natural_order, read_records, require_column
from pf2lora.data.per_client import check_name
from pf2lora.data.split import rng_for, split_rows, subsample
from pf2lora.errors import UserError, unknown
from pf2lora.tasks.classification.glue import GLUE, read_glue
from pf2lora.tasks.classification.rows import (
    MINIMUM_ROWS,
    check_labels,
    choose_columns,
    load_clients,
    rows_of,
)

DEFAULT_CLIENTS = 8  # the paper's number, where the partition itself does not say how many


@dataclass(frozen=True)
class DataSpec:
    """The choice of data: a user's files or a GLUE set, and how its rows go to clients."""

    # A user's own files (paths, globs or folders); columns that are not named are guessed.
    clients: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    text: str | None = None
    pair: str | None = None
    label: str | None = None
    client_column: str | None = None
    test_ratio: float = 0.2
    # Columns of question answering and of generation, guessed where they are not named.
    context: str | None = None
    question: str | None = None
    answers: str | None = None
    prompt: str | None = None
    target: str | None = None
    # Or a GLUE set, from a folder of the official files or else from the hub.
    dataset: str | None = None
    data_dir: str | None = None
    # Who gets what. None: one client per file, or by client_column; for a GLUE set, by heterogeneity.
    partition: str | None = None
    num_clients: int | None = None  # None: 8; for a column, one client per value
    heterogeneity: float = 0.9
    size_ratio: float = 1.0  # largest client : smallest client, for heterogeneity
    dirichlet_alpha: float = 0.5
    partition_column: str | None = None
    groups: tuple[str, ...] = ()  # "name=value,value"
    limit: int | None = None  # at most so many training rows per client


def load(spec: DataSpec, seed: int, known_labels: Sequence[str] | None = None) -> list[Client[TextRow]]:
    """The clients that `spec` describes. The same spec and seed give the same clients, row for row.

    With `known_labels` (a site of a federation, which may not have all of them) no other label is taken.
    """
    _check(spec)
    if spec.dataset is None and spec.partition is None:
        clients = load_clients(
            spec.clients,
            text=spec.text,
            pair=spec.pair,
            label=spec.label,
            client_column=spec.client_column,
            test=spec.test,
            test_ratio=spec.test_ratio,
            seed=seed,
            known_labels=known_labels,
        )
    else:
        clients = _share_out(_read_pool(spec, seed), spec, seed)
    if spec.limit is not None:
        clients = [_limited(client, spec.limit, seed) for client in clients]
    if known_labels is None:
        check_labels(clients)
    return clients


def headline(spec: DataSpec) -> str:
    """The metric that a data set is known by."""
    return GLUE[spec.dataset].metric if spec.dataset in GLUE else "accuracy"


def _check(spec: DataSpec) -> None:
    """Choices that contradict each other are errors: none of them is silently left out."""
    if bool(spec.clients) == (spec.dataset is not None):
        raise UserError(
            "data comes from files (--clients FILES…) or from a GLUE set (--dataset NAME): give one"
        )
    if spec.partition is not None and spec.partition not in PARTITIONS:
        raise unknown("partition", spec.partition, PARTITIONS)
    own_files = {
        "--test": spec.test,
        "--text": spec.text,
        "--pair": spec.pair,
        "--label": spec.label,
        "--client-column": spec.client_column,
    }
    for flag, value in own_files.items():
        if value and spec.dataset is not None:
            raise UserError(f"{flag} is for your own files, not for --dataset {spec.dataset}")
    if spec.data_dir is not None and spec.dataset is None:
        raise UserError("--data-dir is the folder of a GLUE set: name the set with --dataset")
    if spec.client_column is not None and spec.partition is not None:
        raise UserError("--client-column and --partition both say who gets what: give one")
    if spec.partition in ("column", "groups") and spec.partition_column is None:
        raise UserError(f"--partition {spec.partition} needs --partition-column, the column to go by")
    if spec.partition_column is not None and spec.partition not in ("column", "groups"):
        raise UserError("--partition-column is for --partition column or groups")
    if bool(spec.groups) != (spec.partition == "groups"):
        raise UserError("--partition groups and --groups name=value,value … go together")
    if spec.num_clients is not None and (spec.partition == "groups" or _as_given(spec)):
        raise UserError("--num-clients: the number of clients is given already, by the files or the groups")


def _as_given(spec: DataSpec) -> bool:
    return spec.dataset is None and spec.partition is None


# --- rows that a rule shares out -------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Rows of no client yet, each with the key (label or value of a column) that decides who gets it."""

    train: list[TextRow]
    test: list[TextRow]
    train_keys: list[str]
    test_keys: list[str]
    order: list[str]  # label order


def _read_pool(spec: DataSpec, seed: int) -> Pool:
    if spec.dataset == MOVIE_REVIEWS:
        rows = movie_reviews()
        train, test = split_rows(rows, [row.label for row in rows], spec.test_ratio, rng_for(seed, "split"))
        return Pool(train, test, [row.label for row in train], [row.label for row in test], list(LABELS))
    if spec.dataset is not None:
        data = read_glue(spec.dataset, spec.data_dir)
        labels = list(GLUE[spec.dataset].labels)
        return _pool(data.train, data.test, data.train_records, data.test_records, labels, spec)
    records = [record for path in expand_paths(spec.clients) for record in read_records(path)]
    columns = choose_columns(columns_of(records), records[0].file, spec.text, spec.pair, spec.label)
    rows = rows_of(records, columns)
    if spec.test:
        held_out = [record for path in expand_paths(spec.test) for record in read_records(path)]
        test = rows_of(held_out, columns)
    else:
        both = list(zip(rows, records))
        left, out = split_rows(both, [row.label for row in rows], spec.test_ratio, rng_for(seed, "split"))
        rows, records = [row for row, _ in left], [record for _, record in left]
        test, held_out = [row for row, _ in out], [record for _, record in out]
    return _pool(rows, test, records, held_out, natural_order(row.label for row in rows + test), spec)


def _pool(
    train: list[TextRow],
    test: list[TextRow],
    train_records: list[Record],
    test_records: list[Record],
    order: list[str],
    spec: DataSpec,
) -> Pool:
    column = spec.partition_column
    if column is None:
        return Pool(train, test, [row.label for row in train], [row.label for row in test], order)
    for records in (train_records, test_records):
        require_column(column, columns_of(records), records[0].file, "--partition-column")
    keys = [[record.name(column) for record in records] for records in (train_records, test_records)]
    return Pool(train, test, keys[0], keys[1], order)


def _share_out(pool: Pool, spec: DataSpec, seed: int) -> list[Client[TextRow]]:
    """Train and test by the same rule, so that a client is tested on its own distribution."""
    names, rule = PARTITIONS[spec.partition or "heterogeneity"](pool, spec, seed)
    for name in names:
        check_name(name, "partition")
    parts = _parts(rule, pool.train_keys, "training rows"), _parts(rule, pool.test_keys, "test rows")
    for name, train, test in zip(names, *parts):
        if len(train) + len(test) < MINIMUM_ROWS:
            raise UserError(
                f"client {name!r} would get {len(train)} training and {len(test)} test rows; at least "
                f"{MINIMUM_ROWS} are needed: fewer clients, more rows or a more even partition"
            )
    return partition.make_clients(pool.train, pool.test, *parts, names)


Rule = Callable[[Sequence[str]], partition.Parts]


def _parts(rule: Rule, keys: Sequence[str], which: str) -> partition.Parts:
    try:
        return rule(keys)
    except UserError as error:
        raise UserError(f"{which}: {error}") from None


def _heterogeneity(pool: Pool, spec: DataSpec, seed: int) -> tuple[list[str], Rule]:
    clients = _number(spec)
    sizes = partition.uneven_sizes(clients, spec.size_ratio, seed)

    def rule(keys: Sequence[str]) -> partition.Parts:
        return partition.by_heterogeneity(keys, clients, spec.heterogeneity, seed, sizes, pool.order)

    return partition.client_names(clients), rule


def _dirichlet(pool: Pool, spec: DataSpec, seed: int) -> tuple[list[str], Rule]:
    clients = _number(spec)

    def rule(keys: Sequence[str]) -> partition.Parts:
        return partition.by_dirichlet(keys, clients, spec.dirichlet_alpha, seed)

    return partition.client_names(clients), rule


def _column(pool: Pool, spec: DataSpec, seed: int) -> tuple[list[str], Rule]:
    groups = partition.column_groups(pool.train_keys, spec.num_clients)
    return list(groups), lambda keys: partition.by_groups(keys, groups)


def _groups(pool: Pool, spec: DataSpec, seed: int) -> tuple[list[str], Rule]:
    groups = parse_groups(spec.groups)
    return list(groups), lambda keys: partition.by_groups(keys, groups)


PARTITIONS: dict[str, Callable[[Pool, DataSpec, int], tuple[list[str], Rule]]] = {
    "heterogeneity": _heterogeneity,
    "dirichlet": _dirichlet,
    "column": _column,
    "groups": _groups,
}


def _number(spec: DataSpec) -> int:
    return DEFAULT_CLIENTS if spec.num_clients is None else spec.num_clients


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


def _limited(client: Client[TextRow], limit: int, seed: int) -> Client[TextRow]:
    labels = [row.label for row in client.train]
    return replace(client, train=subsample(client.train, labels, limit, rng_for(seed, "limit", client.name)))
