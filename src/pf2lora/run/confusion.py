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


def summed(tables: Sequence[Table | None]) -> list[list[int]] | None:
    """All clients' in one; None where one is missing."""
    known = [table for table in tables if table is not None]
    if not known or len(known) < len(tables):
        return None
    return [[sum(cells) for cells in zip(*rows)] for rows in zip(*known)]


def macro_f1(table: Table) -> float | None:
    """The mean F1 of the labels that are there or were answered."""
    known = [f1 for i in range(len(table)) if (f1 := of_label(table, i).f1) is not None]
    return sum(known) / len(known) if known else None
