"""What a client holds: rows to train on and rows to be tested on. It never leaves the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from pf2lora.data.files import Record

Row = TypeVar("Row", covariant=True)


@dataclass(frozen=True)
class Client(Generic[Row]):
    """One client's data. `train` is what it learns from, `test` what it is measured on."""

    name: str
    train: list[Row]
    test: list[Row]


@dataclass(frozen=True)
class Pool(Generic[Row]):
    """Rows of no client yet, the records they were made from where those are known, and the order of the keys (labels,
    topics) that they are laid out by."""

    train: list[Row]
    test: list[Row]
    train_records: list[Record] | None = None
    test_records: list[Record] | None = None
    order: tuple[str, ...] | None = None
