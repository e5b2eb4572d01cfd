"""What every task does: rows to tokens, the loss, predictions, scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pf2lora.adapters import TwoLevelModel
from pf2lora.data.batches import Batch, Encoded

Row = TypeVar("Row")
Prediction = TypeVar("Prediction")


@dataclass(frozen=True)
class Metric:
    """How a score is shown."""

    label: str
    higher_is_better: bool = True
    percent: bool = True


Scores = dict[str, float | None]
"""One client's scores by metric; None where a score is undefined for its data."""


class Task(ABC, Generic[Row, Prediction]):
    """A task knows its tokenizer and what its rows mean; it holds no weights and no data."""

    name: ClassVar[str]
    metrics: dict[str, Metric]  # the headline first

    @abstractmethod
    def load_model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        """The base model from a hub name or a folder, with this task's head."""

    @abstractmethod
    def encode(self, clients: Sequence[Sequence[Row]], *, training: bool) -> Encoded:
        """The clients' rows as tokens, side by side."""

    @abstractmethod
    def loss(self, model: TwoLevelModel, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """F(x, y; batch): each client's mean loss, shape (M,)."""

    @abstractmethod
    def predict(self, model: TwoLevelModel, x: Tensor, y: Tensor, encoded: Encoded) -> list[list[Prediction]]:
        """What each client's model answers to each of its rows, in the rows' order."""

    @abstractmethod
    def score(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> Scores:
        """One client's scores."""

    def describe(self, rows: Sequence[Row]) -> dict[str, int]:
        """How many rows of each kind (label, topic, …) there are, for the report."""
        return {}


class EvaluationBatch(NamedTuple):
    """Rows of several clients for one forward pass; `real[i]` of client i's rows are not filling."""

    clients: list[int]
    index: np.ndarray  # (K·b,) rows of the encoded data
    real: list[int]


def evaluation_batches(
    encoded: Encoded, size: int, clients_per_pass: int | None = None
) -> Iterator[EvaluationBatch]:
    """Every row of every client once, longest rows first, `size` rows of each client at a time.

    Clients that have run out of rows drop out of the stack; a client's last batch is filled with its last row.
    """
    orders = [
        start + np.argsort(-encoded.lengths[start:stop], kind="stable")
        for start, stop in zip(encoded.starts, encoded.starts[1:])
    ]
    per_pass = clients_per_pass or len(orders)
    for i in range(0, max(map(len, orders)), size):
        active = [k for k, order in enumerate(orders) if len(order) > i]
        for j in range(0, len(active), per_pass):
            clients = active[j : j + per_pass]
            rows = [orders[k][i : i + size] for k in clients]
            width = max(map(len, rows))
            filled = [np.concatenate([r, np.repeat(r[-1:], width - len(r))]) for r in rows]
            yield EvaluationBatch(clients, np.concatenate(filled), [len(r) for r in rows])


@torch.no_grad()
def predict_rows(
    function: Callable[[Tensor, Tensor, Batch], Sequence[Any]],
    x: Tensor,
    y: Tensor,
    encoded: Encoded,
    size: int,
    clients_per_pass: int | None = None,
) -> list[list[Any]]:
    """`function` of every row, per client in the rows' order; it returns one answer per row of its batch."""
    answers: list[list[Any]] = [[None] * n for n in encoded.sizes()]
    device = next(iter(encoded.token_columns.values())).device
    for clients, index, real in evaluation_batches(encoded, size, clients_per_pass):
        at = torch.tensor(clients, device=x.device)
        batch = Batch(len(clients), encoded.rows(index))
        found = function(x.index_select(0, at).to(device), y.index_select(0, at).to(device), batch)
        width = len(index) // len(clients)
        for i, (k, count) in enumerate(zip(clients, real)):
            for j in range(i * width, i * width + count):
                answers[k][index[j] - encoded.starts[k]] = found[j]
    return answers
