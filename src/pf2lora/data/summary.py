"""What each client got, in numbers: rows per label, and how far clients differ from one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pf2lora.data.client import Client
from pf2lora.data.files import natural_order

OTHER = "other"
Row = TypeVar("Row")
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Summary:
    """Rows per client (first axis) and label (second axis)."""

    clients: list[str]
    labels: list[str]
    train: Counts
    test: Counts

    @property
    def train_shares(self) -> NDArray[np.float64]:
        return _shares(self.train)

    @property
    def test_shares(self) -> NDArray[np.float64]:
        return _shares(self.test)

    @property
    def skew(self) -> float:
        """Mean distance (total variation) of a client's label shares from all clients' together.

        0: every client has the same shares. It grows towards 1 as clients share no label.
        """
        together = _shares(self.train.sum(axis=0, keepdims=True))
        return float(np.abs(self.train_shares - together).sum(axis=1).mean() / 2)

    def with_most(self, labels: int) -> Summary:
        """The same with the most frequent labels kept and the rest joined, so that it can be shown."""
        if len(self.labels) <= labels:
            return self
        frequent = set(np.argsort(-self.train.sum(axis=0), kind="stable")[: labels - 1].tolist())
        kept = [i for i in range(len(self.labels)) if i in frequent]
        rest = [i for i in range(len(self.labels)) if i not in frequent]
        train, test = (
            np.column_stack([counts[:, kept], counts[:, rest].sum(axis=1)])
            for counts in (self.train, self.test)
        )
        return Summary(self.clients, [*(self.labels[i] for i in kept), f"{OTHER} ({len(rest)})"], train, test)


def summarize(clients: Sequence[Client[Row]], key: Callable[[Row], str]) -> Summary:
    """Count every client's labels, topics or categories: `key` of its rows."""
    labels = natural_order(key(row) for client in clients for row in [*client.train, *client.test])

    def count(rows: list[Row]) -> list[int]:
        counter = Counter(map(key, rows))
        return [counter[label] for label in labels]

    return Summary(
        [client.name for client in clients],
        labels,
        np.array([count(client.train) for client in clients], dtype=np.int64),
        np.array([count(client.test) for client in clients], dtype=np.int64),
    )


def _shares(counts: Counts) -> NDArray[np.float64]:
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
