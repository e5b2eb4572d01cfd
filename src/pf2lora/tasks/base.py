"""What every task does: rows to tokens, the loss, predictions, scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.accumulation import mean_loss
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.engines.helpers import Helpers
from pf2lora.errors import UserError
from pf2lora.tasks.settings import Metric

Row = TypeVar("Row")
Prediction = TypeVar("Prediction")


Scores = dict[str, float | None]
"""One client's scores by metric; None where a score is undefined for its data."""


class Example(NamedTuple):
    """A question or prompt, what a good answer is, and what was answered."""

    prompt: str
    references: tuple[str, ...]
    output: str
    row: int = 0  # which of the client's test rows it is


class Shown(NamedTuple):
    """An example as the model sees it: its tokens as texts, which of them it is to find (those with loss, or the
    answer), and a line about it."""

    tokens: list[str]
    marked: list[bool]
    about: str


class Task(ABC, Generic[Row, Prediction]):
    """A task knows its tokenizer and what its rows mean; it holds no weights and no data."""

    name: ClassVar[str]
    peft_type: ClassVar[str | None] = None  # what PEFT calls such a task in an adapter's config
    labels: list[str] = []  # noqa: RUF012  the names of the model's outputs, where they have names
    metrics: dict[str, Metric]  # the headline first
    tokenizer: PreTrainedTokenizerBase
    clients_per_pass: int | None = None  # answering in one pass; bounds memory, as in training
    micro_batch: int | None = (
        None  # rows of each client whose gradient is taken at once; None: the whole batch
    )
    helpers: Helpers | None = None  # processes that take their part of each batch's rows
    evaluation_batch: int = 64  # rows of each client that are answered at once
    shown_examples: ClassVar[int] = 3  # of each client, unless the run says how many
    trivial_label: ClassVar[str] = ""
    writes: bool = False  # whether it has scores of what it writes, which are of a run's end alone

    @abstractmethod
    def load_model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        """The base model from a hub name or a folder, with this task's head."""

    @abstractmethod
    def encode(self, clients: Sequence[Sequence[Row]], *, training: bool) -> Encoded:
        """The clients' rows as tokens, side by side."""

    def weighed(self, encoded: Encoded, train: Encoded) -> Encoded:
        """The same rows with what their losses count, where that follows from each client's training rows `train`:
        of those rows themselves, which `encode` weighs, and of the rows that models are chosen by."""
        return encoded

    @abstractmethod
    def example_losses(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The loss of each of the batch's examples times its weight, and that weight; both (M·b,)."""

    def loss(self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch) -> Tensor:
        """F(x, y; batch): each client's mean loss, shape (M,)."""
        sums = partial(self.loss_sums, model)
        return mean_loss(sums, common, personal, batch, self.micro_batch, self.helpers)

    def loss_sums(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Each client's losses and their weights, summed over its rows of the batch; both (M,)."""
        losses, weights = self.example_losses(model, common, personal, batch)
        return losses.view(batch.clients, -1).sum(1), weights.view(batch.clients, -1).sum(1)

    def losses(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, clients: Sequence[int]
    ) -> Tensor:
        """The losses of K models `(K, P)`, `(K, Q)` on the examples of `clients`, one for each of them: `(K, n)`, the
        longest example first, nan behind the last. Their mean is the mean loss, by the examples' weights."""
        device, rows = encoded.device, encoded.of(clients)
        shape = len(clients), max(rows.sizes(), default=0)
        losses = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        weights = losses.clone()
        filled = [0] * len(clients)
        with torch.no_grad():
            for together, index, real in evaluation_batches(
                rows, self.evaluation_batch, self.clients_per_pass
            ):
                at = torch.tensor(together)
                x, y = (t.index_select(0, at.to(t.device)).to(device) for t in (common, personal))
                found = self.example_losses(model, x, y, encoded.batch(len(together), index))
                width, start = len(index) // len(together), filled[together[0]]
                filling = torch.arange(width) >= torch.tensor(real).unsqueeze(1)
                for whole, values in zip((losses, weights), found):
                    part = values.double().view(len(together), -1).masked_fill(filling.to(device), torch.nan)
                    whole[at.to(device), start : start + width] = part
                for k in together:
                    filled[k] += width
        # Every example's loss times its weight, over the mean weight: the rows' mean is the weighted one.
        return (losses / weights.nanmean(1, keepdim=True)).to(common.device)

    @abstractmethod
    def predict(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, *, final: bool = False
    ) -> list[list[Prediction]]:
        """What each client's model answers to each of its rows, in the rows' order.

        `final` asks for what is too costly to do during a run as well: generated text.
        """

    @abstractmethod
    def score(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> Scores:
        """One client's scores."""

    def score_clients(
        self, predictions: Sequence[Sequence[Prediction]], clients: Sequence[Sequence[Row]]
    ) -> list[Scores]:
        """Every client's scores."""
        return [self.score(found, rows) for found, rows in zip(predictions, clients)]

    def resampled(
        self, predictions: Sequence[Prediction], rows: Sequence[Row], draws: np.ndarray
    ) -> np.ndarray | None:
        """The headline metric on resampled rows, `draws (times, rows)` of them; None where it is no function of rows
        that can be taken again cheaply, as scores of generated text are not."""
        return None

    def describe(self, rows: Sequence[Row]) -> dict[str, int]:
        """How many rows of each kind (label, topic, …) there are, for the report."""
        return {}

    def show(self, row: Row) -> Shown:
        """A row's first example as it is trained on."""
        return self.shown(self.encode([[row]], training=True))

    def shown(self, encoded: Encoded, at: int = 0, marked: Sequence[bool] = (), about: str = "") -> Shown:
        """The example number `at` of some rows."""
        ids = encoded.token_columns["input_ids"][at, : int(encoded.lengths[at])].tolist()
        tokens = [token_text(self.tokenizer, token) for token in ids]
        return Shown(tokens, list(marked)[: len(ids)] or [False] * len(ids), about)

    def input_text(self, row: Row) -> str:
        """What a row asks, without its answer."""
        raise UserError(f"the task {self.name!r} does not say what its rows ask (Task.input_text)")

    def answer(self, prediction: Prediction, row: Row) -> dict[str, Any]:
        """A prediction as columns beside the row's own; `predicted` is what was asked for."""
        return {"predicted": prediction if isinstance(prediction, int | float | str) else str(prediction)}

    def example(self, prediction: Prediction, row: Row) -> Example | None:
        """A prediction to be read beside others, for the report; None where that would say nothing."""
        return None

    def examples(self, predictions: Sequence[Prediction], rows: Sequence[Row], most: int) -> list[Example]:
        """Some of a client's answers to be read: the first rows', so that every method shows the same."""
        found = (self.example(a, row) for a, row in zip(predictions[:most], rows))
        return [example._replace(row=i) for i, example in enumerate(found) if example is not None]

    def confusion(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> list[list[int]] | None:
        """How many rows of each label got which label as an answer; None where answers are no labels."""
        return None

    def trivial(self, train: Sequence[Row], test: Sequence[Row]) -> Scores | None:
        """The scores of the best answer that looks at no text, which `trivial_label` names; None where there is no
        such answer."""
        return None

    @property
    def notes(self) -> list[str]:
        """What the user should know: rows cut or skipped, scores that could not be computed. Each once."""
        return list(self._notes)

    def note(self, line: str) -> None:
        self._notes[line] = None

    @cached_property
    def _notes(self) -> dict[str, None]:
        return {}


@dataclass(frozen=True)
class Examples(Encoded):
    """Rows that became one or more examples each: windows of a context, targets of a prompt. `Encoded`'s rows are
    the examples; `row_numbers (N,)` says to which row of its client each belongs, `row_counts` how many there are."""

    row_numbers: np.ndarray = field(kw_only=True)
    row_counts: tuple[int, ...] = field(kw_only=True)

    def by_row(self, answers: Sequence[Sequence[Any]]) -> list[list[list[Any]]]:
        """Answers to the examples, collected for each client's rows in order."""
        collected: list[list[list[Any]]] = []
        for k, found in zip(self.clients, answers):
            rows: list[list[Any]] = [[] for _ in range(self.row_counts[k])]
            for number, answer in zip(self.row_numbers[self.starts[k] :], found):
                rows[number].append(answer)
            collected.append(rows)
        return collected


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """What a token stands for; its name where that is no whole character, or nothing."""
    text = str(tokenizer.decode([token]))
    return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(token))


def pad_columns(
    tokens: Mapping[str, list[list[int]]],
    pad: int,
    row_columns: dict[str, Tensor],
    sizes: Sequence[int],
) -> Encoded:
    """A tokenizer's ragged output as right-padded columns."""
    ids = tokens["input_ids"]
    lengths = np.array([len(row) for row in ids])
    width = int(lengths.max(initial=1))
    columns = {}
    for name in ("input_ids", "token_type_ids", "target", "example", "position"):
        if name in tokens:
            fill = pad if name == "input_ids" else 0
            column = np.full((len(ids), width), fill, dtype=np.int32)
            for i, row in enumerate(tokens[name]):
                column[i, : len(row)] = row
            columns[name] = torch.from_numpy(column)
    starts = tuple(int(s) for s in np.concatenate([[0], np.cumsum(sizes)]))
    targets = np.array([sum(row[1:]) for row in tokens["target"]]) if "target" in tokens else None
    return Encoded(
        columns, row_columns, lengths, starts, targets=targets
    )  # nothing predicts a row's first token


ROWS_ANSWERED: ContextVar[Callable[[int], None]] = ContextVar("rows answered", default=lambda rows: None)
"""Who is told how many more rows were answered, while a run evaluates: a bar that would stand still otherwise."""


@contextmanager
def telling_rows(tell: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile `tell` hears of every batch of rows that was answered."""
    before = ROWS_ANSWERED.set(tell)
    try:
        yield
    finally:
        ROWS_ANSWERED.reset(before)


class EvaluationBatch(NamedTuple):
    """Rows of several clients for one forward pass; `real[i]` of client i's rows are not filling."""

    clients: list[int]
    rows: np.ndarray  # (K·b,) of the encoded data
    real: list[int]


def evaluation_batches(
    encoded: Encoded, size: int, clients_per_pass: int | None = None
) -> Iterator[EvaluationBatch]:
    """Every row of every client once, longest rows first, `size` rows of each client at a time.

    Clients that have run out of rows drop out of the stack; a client's last batch is filled with its last row.
    """
    orders = [
        start + np.argsort(-encoded.lengths[start:stop], kind="stable") for start, stop in encoded.spans
    ]
    per_pass = clients_per_pass or len(orders)
    for i in range(0, max(map(len, orders), default=0), size):
        active = [k for k, order in enumerate(orders) if len(order) > i]
        for j in range(0, len(active), per_pass):
            clients = active[j : j + per_pass]
            rows = [orders[k][i : i + size] for k in clients]
            width = max(map(len, rows))
            filled = [np.concatenate([r, np.repeat(r[-1:], width - len(r))]) for r in rows]
            yield EvaluationBatch(clients, np.concatenate(filled), [len(r) for r in rows])
            ROWS_ANSWERED.get()(sum(map(len, rows)))


@torch.no_grad()
def predict_rows(
    function: Callable[[Tensor, Tensor, Batch], Any],
    common: Tensor,
    personal: Tensor,
    encoded: Encoded,
    size: int,
    clients_per_pass: int | None = None,
) -> list[list[Any]]:
    """`function` of every row, per client in the rows' order; it returns one answer per row of its batch."""
    answers: list[list[Any]] = [[None] * n for n in encoded.sizes()]
    device, spans = encoded.device, encoded.spans
    for clients, index, real in evaluation_batches(encoded, size, clients_per_pass):
        at = torch.tensor(clients, device=common.device)
        batch = encoded.batch(len(clients), index)
        found = function(
            common.index_select(0, at).to(device), personal.index_select(0, at).to(device), batch
        )
        width = len(index) // len(clients)
        for i, (k, count) in enumerate(zip(clients, real)):
            for j in range(i * width, i * width + count):
                answers[k][index[j] - spans[k][0]] = found[j]
    return answers
