"""What the data of a run is: where it comes from and how it is shared out among clients."""

from __future__ import annotations

from dataclasses import dataclass

from pf2lora.settings import setting

FILES, NAMED_SET, SHARING = "Your own files", "A data set by name", "Who gets what"


@dataclass(frozen=True)
class DataSettings:
    """A user's files or a data set by name, and how its rows go to clients."""

    clients: tuple[str, ...] = setting((), "files (jsonl, json, csv, tsv, parquet), one per client")
    test: tuple[str, ...] = setting((), "test files, named like the clients' files")
    client_column: str | None = setting(None, "column that names each row's client")
    test_ratio: float = setting(0.2, "share of each client's rows to test on")
    validation: tuple[str, ...] = setting((), "validation files, named like the clients' files")
    validation_ratio: float = setting(
        0.1, "share of each client's training rows to choose by, 20 to 500 rows; 0: none"
    )
    dataset: str | None = setting(None, "a data set that the task knows by name")
    data_dir: str | None = setting(
        None, "folder of the data set's official files; GLUE and SQuAD come from the hub without it"
    )
    partition: str | None = setting(
        None, "share pooled rows out by heterogeneity, dirichlet, column, groups or even-groups"
    )
    num_clients: int | None = setting(
        None, "number of clients (default: the data set's, else 8; column: one per value)"
    )
    heterogeneity: float | None = setting(
        None, "0: i.i.d. … 1: sorted by label or topic (default: the paper's for the data set, else 0.9)"
    )
    size_ratio: float = setting(1.0, "largest client : smallest, for heterogeneity")
    dirichlet_alpha: float = setting(0.5, "Dirichlet's α; small: skewed, large: even")
    partition_column: str | None = setting(None, "column for --partition column or groups")
    groups: tuple[str, ...] = setting((), "name=value,value … for --partition groups")
    limit: int | None = setting(None, "at most so many training rows per client")
    test_limit: int | None = setting(None, "at most so many test rows per client")


PANELS = (
    dict.fromkeys(("clients", "test", "client_column", "test_ratio", "validation", "validation_ratio"), FILES)
    | dict.fromkeys(("dataset", "data_dir"), NAMED_SET)
    | dict.fromkeys(
        ("partition", "num_clients", "heterogeneity", "size_ratio", "dirichlet_alpha", "partition_column"),
        SHARING,
    )
    | dict.fromkeys(("groups", "limit", "test_limit"), SHARING)
)
"""Under which heading `--help` shows each of them."""
