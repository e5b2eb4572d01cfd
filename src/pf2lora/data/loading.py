"""The clients that a run's data settings describe, for any task: files or a data set in, clients with rows out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pf2lora.core.streams import numpy_generator
from pf2lora.data.client import Client, Pool, by_column, check_same_clients, records_per_client
from pf2lora.data.files import Record, expand_paths, natural_order
from pf2lora.data.memory import Tables
from pf2lora.data.settings import DataSettings
from pf2lora.data.sharing import PARTITIONS, share_out
from pf2lora.data.split import (
    MINIMUM_ROWS,
    MOST_VALIDATION_ROWS,
    split_rows,
    split_validation,
    subsample,
)
from pf2lora.data.suspicions import seen_before
from pf2lora.errors import UserError, unknown
from pf2lora.settings import column_settings

if TYPE_CHECKING:
    from pf2lora.tasks.settings import TaskSettings

Row = TypeVar("Row")
ReadPart = Callable[[str], dict[str, list[Record]]]
DEFAULT_PARTITION, DEFAULT_CLIENTS, DEFAULT_HETEROGENEITY = "heterogeneity", 8, 0.9


def load_clients(
    task: TaskSettings[Row],
    data: DataSettings,
    seed: int,
    *,
    labels: Sequence[str] | None = None,
    notes: list[str] | None = None,
    tables: Tables | None = None,
) -> list[Client[Row]]:
    """The clients. The same settings and seed give the same clients, row for row. `tables` are rows in memory, for
    parts that are not in files.

    `labels` are those agreed on beforehand, for one who sees only some clients (a site of a federation); without, they
    are those of the training rows. What the user should know is added to `notes`.
    """
    notes = [] if notes is None else notes
    data = filled_in(task, data)
    read = partial(given_records, task, data, tables or {})
    test_records: dict[str, list[Record]] = {}
    if data.dataset is not None:
        pool = task.datasets[data.dataset].read(data, seed, notes)
        clients = share_out(pool, task.partition_key, data, seed)
    elif data.partition is not None:
        clients = share_out(
            pooled_files(task, data, seed, notes, tables or {}), task.partition_key, data, seed
        )
    else:
        clients, test_records = from_files(task, data, seed, notes, read)
    clients = [replace(c, train=limited(task, c.train, data.limit, seed, "limit", c.name)) for c in clients]
    task.check(clients, task.labels(clients) if labels is None else labels, test_records)
    clients = [
        replace(c, test=limited(task, c.test, data.test_limit, seed, "test limit", c.name)) for c in clients
    ]
    if data.validation:
        clients = with_validation_files(task, clients, seed, labels, notes, read)
    else:
        clients = [with_validation(task, client, data.validation_ratio, seed) for client in clients]
    notes += seen_before(clients)
    return clients


def given_records(
    task: TaskSettings[Any], data: DataSettings, tables: Tables, part: str
) -> dict[str, list[Record]]:
    """Each client's records of a part ("clients", "test", "validation"), from memory or from files."""
    if part not in tables:
        return records_per_client(expand_paths(getattr(data, part)), data.client_column, task.read_records)
    if data.client_column is None:
        return dict(tables[part])
    return by_column([(part, [r for own in tables[part].values() for r in own])], data.client_column)


def filled_in(task: TaskSettings[Any], data: DataSettings) -> DataSettings:
    """The settings, checked, with what was left open as the data set's paper has it."""
    check(task, data)
    if data.dataset is None and data.partition is None:
        return data
    known = task.datasets.get(data.dataset or "")
    rule = data.partition or (known.partition if known else DEFAULT_PARTITION)
    counted = rule not in ("column", "groups")  # there, values or groups say how many clients there are
    return replace(
        data,
        partition=rule,
        num_clients=data.num_clients
        or ((known.num_clients if known else DEFAULT_CLIENTS) if counted else None),
        heterogeneity=(known.heterogeneity if known else DEFAULT_HETEROGENEITY)
        if data.heterogeneity is None
        else data.heterogeneity,
    )


def check(task: TaskSettings[Any], data: DataSettings) -> None:
    """Choices that contradict each other are errors: none of them is silently left out."""
    sets = ", ".join(task.datasets) or "none"
    if bool(data.clients) == (data.dataset is not None):
        raise UserError(
            f"data comes from files (--clients FILES…) or from a data set (--dataset NAME): give one "
            f"({task.name} knows {sets})"
        )
    if data.dataset is not None and data.dataset not in task.datasets:
        raise unknown(f"data set for {task.name}", data.dataset, task.datasets)
    if data.partition is not None and data.partition not in PARTITIONS:
        raise unknown("partition", data.partition, PARTITIONS)
    own_files: dict[str, Any] = {
        "--test": data.test,
        "--validation": data.validation,
        "--client-column": data.client_column,
    }
    own_files |= {f"--{name.replace('_', '-')}": getattr(task, name) for name in column_settings(type(task))}
    for flag, value in own_files.items():
        if value and data.dataset is not None:
            raise UserError(f"{flag} is for your own files, not for --dataset {data.dataset}")
    if data.validation and data.partition is not None:
        raise UserError(
            "--validation files are named like the clients' files, and --partition pools those: give one"
        )
    if data.data_dir is not None and data.dataset is None:
        raise UserError("--data-dir is the folder of a data set: name the set with --dataset")
    if data.client_column is not None and data.partition is not None:
        raise UserError("--client-column and --partition both say who gets what: give one")
    if data.partition in ("column", "groups") and data.partition_column is None:
        raise UserError(f"--partition {data.partition} needs --partition-column, the column to go by")
    if data.partition_column is not None and data.partition not in ("column", "groups"):
        raise UserError("--partition-column is for --partition column or groups")
    if bool(data.groups) != (data.partition == "groups"):
        raise UserError("--partition groups and --groups name=value,value … go together")
    as_given = data.dataset is None and data.partition is None
    if data.num_clients is not None and (data.partition == "groups" or as_given):
        raise UserError("--num-clients: the number of clients is given already, by the files or the groups")
    if data.heterogeneity is not None and as_given:
        raise UserError("--heterogeneity is for pooled rows: files are shared out as they are given")


def from_files(
    task: TaskSettings[Row], data: DataSettings, seed: int, notes: list[str], read: ReadPart
) -> tuple[list[Client[Row]], dict[str, list[Record]]]:
    """One client per file, or per value of the client column, and the records of the test rows, where they have files
    of their own; else a seeded part of each client's rows is held out."""
    train = read("clients")
    first = next(iter(train.values()))
    needed = 1 if data.test and data.validation else MINIMUM_ROWS  # nothing has to be split off
    for name, records in train.items():
        if len(records) < needed:
            raise UserError(
                f"{records[0].file}: client {name!r} has {len(records)} rows; at least {needed} are needed"
            )
    rows = {name: task.rows(records, first, notes) for name, records in train.items()}
    if not data.test:
        return [split_client(task, name, own, data.test_ratio, seed) for name, own in rows.items()], {}
    held_out = read("test")
    check_same_clients(train, held_out)
    clients = [Client(name, own, task.rows(held_out[name], first, notes)) for name, own in rows.items()]
    return clients, held_out


def split_client(
    task: TaskSettings[Row], name: str, rows: Sequence[Row], test_ratio: float, seed: int
) -> Client[Row]:
    """A client with a part of its rows held out, drawn by its name: who else takes part does not change it."""
    keys = [task.split_key(row) for row in rows]
    return Client(name, *split_rows(rows, keys, test_ratio, numpy_generator(seed, "split", name)))


def pooled_files(
    task: TaskSettings[Row], data: DataSettings, seed: int, notes: list[str], tables: Tables
) -> Pool[Row]:
    """All rows of all files, to be shared out by a rule."""

    def read(part: str) -> list[Record]:
        if part in tables:
            return [record for own in tables[part].values() for record in own]
        return [record for path in expand_paths(getattr(data, part)) for record in task.read_records(path)]

    records = read("clients")
    rows = task.rows(records, None, notes)
    if data.test:
        held_out = read("test")
        test = task.rows(held_out, records, notes)
    else:
        keys = [task.split_key(row) for row in rows]
        left, out = split_rows(
            list(zip(rows, records)), keys, data.test_ratio, numpy_generator(seed, "split")
        )
        rows, records = [row for row, _ in left], [record for _, record in left]
        test, held_out = [row for row, _ in out], [record for _, record in out]
    order = tuple(natural_order(task.partition_key(row) for row in rows + test))
    return Pool(rows, test, records, held_out, order)


def limited(task: TaskSettings[Row], rows: list[Row], most: int | None, seed: int, *stream: str) -> list[Row]:
    """At most so many of the rows, with the shares of their labels kept."""
    if most is None:
        return rows
    return subsample(rows, [task.split_key(row) for row in rows], most, numpy_generator(seed, *stream))


def with_validation(task: TaskSettings[Row], client: Client[Row], ratio: float, seed: int) -> Client[Row]:
    """The client with a part of its training rows set aside to choose by, drawn by its name."""
    keys = [task.split_key(row) for row in client.train]
    train, validation = split_validation(
        client.train, keys, ratio, numpy_generator(seed, "validation", client.name)
    )
    return replace(client, train=train, validation=validation)


def with_validation_files(
    task: TaskSettings[Row],
    clients: list[Client[Row]],
    seed: int,
    labels: Sequence[str] | None,
    notes: list[str],
    read: ReadPart,
) -> list[Client[Row]]:
    """The clients with the validation rows that have files of their own; of a large file, which may be sorted by label,
    some are drawn."""
    records = read("validation")
    check_same_clients([client.name for client in clients], records, "validation")
    first = next(iter(read("clients").values()))
    rows = {name: task.rows(own, first, notes) for name, own in records.items()}
    known = task.labels(clients) if labels is None else labels
    task.check([Client(c.name, c.train, rows[c.name]) for c in clients], known, records)
    few = {
        name: limited(task, own, MOST_VALIDATION_ROWS, seed, "validation", name) for name, own in rows.items()
    }
    return [replace(client, validation=few[client.name]) for client in clients]


def read_rows(task: TaskSettings[Row], file: Path, labels: Sequence[str]) -> list[Row]:
    """The rows of one more file, as they are: to measure on, or of a newcomer."""
    records = task.read_records(file)
    rows = task.rows(records)
    task.check([Client(file.stem, [], rows)], labels, {file.stem: records})
    return rows
