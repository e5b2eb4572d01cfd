"""What a client holds: rows to train on and rows to be tested on. It never leaves the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row", covariant=True)


@dataclass(frozen=True)
class TextRow:
    """One text, or a pair of texts, with its label's name."""

    text: str
    label: str
    pair: str | None = None


@dataclass(frozen=True)
class Client(Generic[Row]):
    """One client's data. `train` is what it learns from, `test` what it is measured on."""

    name: str
    train: list[Row]
    test: list[Row]
