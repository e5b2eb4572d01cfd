"""Of a table of right labels and answers: how good each label is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Table = Sequence[Sequence[int]]
"""Test rows by right label (rows) and by answer (columns)."""


class OfLabel(NamedTuple):
    """None where there is nothing to divide by: a label that was never answered has no precision."""

    precision: float | None
    recall: float | None
    f1: float | None
    rows: int


def of_label(table: Table, i: int) -> OfLabel:
    """Precision, recall and F1 of a label, and how many rows have it."""
    right, rows, answered = table[i][i], sum(table[i]), sum(row[i] for row in table)
    return OfLabel(
        right / answered if answered else None,
        right / rows if rows else None,
        2 * right / (rows + answered) if rows + answered else None,
        rows,
    )


def of_labels(table: Table) -> list[OfLabel]:
    """The same for every label."""
    return [of_label(table, i) for i in range(len(table))]


def macro_f1(table: Table) -> float | None:
    """The mean F1 of the labels that are there or were answered."""
    known = [found.f1 for found in of_labels(table) if found.f1 is not None]
    return sum(known) / len(known) if known else None
