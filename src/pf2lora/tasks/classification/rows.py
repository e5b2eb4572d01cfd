"""Text classification from a user's own files: a text (or a pair of texts) and a label in each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pf2lora.data.client import Client, TextRow
from pf2lora.data.files import (
    Record,
    choose_column,
    columns_of,
    expand_paths,
    find_column,
    natural_order,
    read_records,
    require_column,
)
from pf2lora.data.per_client import check_same_clients, records_per_client
from pf2lora.data.split import rng_for, split_rows
from pf2lora.errors import UnknownLabel, UserError

TEXT_COLUMNS = ("text", "sentence", "review", "content", "comment", "message", "body", "document", "tweet")
LABEL_COLUMNS = (
    "label",
    "labels",
    "sentiment",
    "class",
    "target",
    "category",
    "gold_label",
    "is_duplicate",
    "y",
)
PAIR_COLUMNS = (
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text1", "text2"),
)
MINIMUM_ROWS = 4  # fewer cannot be split into something to learn from and something to be measured on


@dataclass(frozen=True)
class Columns:
    """Which columns hold the text, the second text if rows are pairs, and the label."""

    text: str
    pair: str | None
    label: str

    def row(self, record: Record) -> TextRow:
        """The record as a row; an error that names its line if something is missing."""
        pair = record.text(self.pair) if self.pair else None
        return TextRow(record.text(self.text), record.name(self.label), pair)


def choose_columns(
    columns: Sequence[str], file: str | Path, text: str | None, pair: str | None, label: str | None
) -> Columns:
    """The columns that the user named; those not named are guessed from the file's header."""
    if pair is not None:
        require_column(pair, columns, file, "--pair")
    if text is None:
        text, pair = _guess_texts([name for name in columns if name != label], pair)
    text = choose_column([c for c in columns if c != pair], text, TEXT_COLUMNS, file, "--text")
    rest = [name for name in columns if name not in (text, pair)]
    return Columns(text, pair, choose_column(rest, label, LABEL_COLUMNS, file, "--label"))


def _guess_texts(columns: Sequence[str], pair: str | None) -> tuple[str | None, str | None]:
    """A well-known pair of columns if both are there: they say more than a single `sentence` would."""
    for first, second in PAIR_COLUMNS:
        one, two = find_column(columns, [first]), find_column(columns, [second])
        if one and two and pair in (None, two):
            return one, two
    return None, pair


def load_clients(
    paths: Sequence[str | Path],
    *,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    client_column: str | None = None,
    test: Sequence[str | Path] | None = None,
    test_ratio: float = 0.2,
    seed: int = 0,
    known_labels: Sequence[str] | None = None,
) -> list[Client[TextRow]]:
    """All clients from files: one file per client, or any files with a column that names the client.

    Columns that are not named are guessed from the first client's file and are the same for all. Test rows
    come from `test` files (same stems, or same client column), else they are a seeded `test_ratio` of each
    client's rows. `known_labels` are labels agreed on beforehand, for one who sees only some clients (a site
    of a federation, a newcomer); by default they are those of the training rows.
    """
    train = records_per_client(expand_paths(paths), client_column)
    first = next(iter(train.values()))
    columns = choose_columns(columns_of(first), first[0].file, text, pair, label)
    for name, records in train.items():
        rows = len(records)
        if rows < MINIMUM_ROWS:
            file = records[0].file
            raise UserError(f"{file}: client {name!r} has {rows} rows; at least {MINIMUM_ROWS} are needed")
    if not test:
        clients = [_split_client(name, rows_of(r, columns), test_ratio, seed) for name, r in train.items()]
        check_labels(clients, known_labels)
        return clients
    held_out = records_per_client(expand_paths(test), client_column)
    check_same_clients(train, held_out)
    clients = [
        Client(name, rows_of(records, columns), rows_of(held_out[name], columns))
        for name, records in train.items()
    ]
    check_labels(clients, known_labels, held_out)
    return clients


def _split_client(name: str, rows: list[TextRow], test_ratio: float, seed: int) -> Client[TextRow]:
    # Drawn by the client's name: who else takes part does not change its split.
    rng = rng_for(seed, "split", name)
    return Client(name, *split_rows(rows, [row.label for row in rows], test_ratio, rng))


def read_rows(
    path: str | Path, *, text: str | None = None, pair: str | None = None, label: str | None = None
) -> list[TextRow]:
    """One file's rows, as they are: for measuring on a file."""
    records = read_records(path)
    return rows_of(records, choose_columns(columns_of(records), path, text, pair, label))


def rows_of(records: Sequence[Record], columns: Columns) -> list[TextRow]:
    """Records as rows; an error that names the file or the line where something is missing."""
    there = columns_of(records)
    for name in filter(None, (columns.text, columns.pair, columns.label)):
        require_column(name, there, records[0].file)
    return [columns.row(record) for record in records]


def label_names(clients: Iterable[Client[TextRow]]) -> list[str]:
    """Every label that some client trains on, in natural order: the order of a classifier's outputs."""
    return natural_order(row.label for client in clients for row in client.train)


def check_labels(
    clients: Sequence[Client[TextRow]],
    known: Sequence[str] | None = None,
    held_out: Mapping[str, Sequence[Record]] | None = None,
) -> None:
    """There must be something to tell apart, and nothing in the tests that no one could have learned.

    `held_out` are the records of the test rows, where they come from files of their own: they name the line.
    """
    labels = list(known) if known is not None else label_names(clients)
    if len(labels) < 2:
        raise UserError(f"only one label, {labels[0]!r}, in all training rows; two or more are needed")
    for client in clients:
        for part in (client.train, client.test):
            for index, row in enumerate(part):
                if row.label not in labels:
                    records = held_out[client.name] if held_out and part is client.test else None
                    where = records[index].where if records else f"client {client.name!r}"
                    raise _unseen_label(where, row.label, labels)


def _unseen_label(where: str, label: str, labels: Sequence[str]) -> UnknownLabel:
    listed = ", ".join(labels[:12]) + (" …" if len(labels) > 12 else "")
    return UnknownLabel(f"{where}: the label {label!r} is unseen in training (labels there: {listed})")
