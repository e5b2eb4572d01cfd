"""Rows of text classification: a text (or a pair of texts) and a label, from records of a user's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pf2lora.data.client import Client
from pf2lora.data.files import (
    Record,
    choose_column,
    columns_of,
    find_column,
    natural_order,
    require_column,
)
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


@dataclass(frozen=True)
class TextRow:
    """One text, or a pair of texts, with its label's name."""

    text: str
    label: str
    pair: str | None = None


@dataclass(frozen=True)
class Columns:
    """Which columns hold the text, the second text if rows are pairs, and the label."""

    text: str
    pair: str | None
    label: str

    def row(self, record: Record) -> TextRow:
        """The record as a row; an error that names its line if something is missing."""
        pair = record.text(self.pair) if self.pair else None
        label = record.name(self.label)
        if label.casefold() == "nan":  # what many programs write where there was none
            raise UserError(
                f"{record.where}: the label {label!r} stands for a missing one: leave the row out, or call it otherwise"
            )
        return TextRow(record.text(self.text), label, pair)


def choose_columns(
    columns: Sequence[str], file: str | Path, text: str | None, pair: str | None, label: str | None
) -> Columns:
    """The columns that the user named; those not named are guessed from the file's header."""
    text, pair = choose_texts(columns, file, text, pair, label)
    rest = [name for name in columns if name not in (text, pair)]
    return Columns(text, pair, choose_column(rest, label, LABEL_COLUMNS, file, "--label"))


def choose_texts(
    columns: Sequence[str], file: str | Path, text: str | None, pair: str | None, label: str | None
) -> tuple[str, str | None]:
    """The column of the text, and that of the second one where rows are pairs."""
    if pair is not None:
        require_column(pair, columns, file, "--pair")
    if text is None:
        text, pair = _guess_texts([name for name in columns if name != label], pair)
    return choose_column([c for c in columns if c != pair], text, TEXT_COLUMNS, file, "--text"), pair


def _guess_texts(columns: Sequence[str], pair: str | None) -> tuple[str | None, str | None]:
    """A well-known pair of columns if both are there: they say more than a single `sentence` would."""
    for first, second in PAIR_COLUMNS:
        one, two = find_column(columns, [first]), find_column(columns, [second])
        if one and two and pair in (None, two):
            return one, two
    return None, pair


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
    labels: Sequence[str],
    held_out: Mapping[str, Sequence[Record]] | None = None,
) -> None:
    """There must be something to tell apart, and nothing in the tests that no one could have learned.

    `held_out` are the records of the test rows, where they come from files of their own: they name the line.
    """
    if len(labels) < 2:
        raise UserError(f"only one label, {labels[0]!r}, in all training rows; two or more are needed")
    numbers = [label for label in labels if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", label)]
    if len(numbers) > len(labels) / 2:
        raise UserError(
            f"the labels are numbers such as {numbers[0]}: classification takes names of classes, and regression is "
            f"another task (CONTRIBUTING.md has one)"
        )
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
