"""What every task does: rows to tokens, the loss, predictions, scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.accumulation import mean_loss
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.engines.helpers import Helpers
from pf2lora.engines.room import Rooms
from pf2lora.errors import UserError
from pf2lora.tasks.answering import answered_batches
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
    helpers: Helpers | None = None  # processes that take their part of each batch's rows
    evaluation_batch: int = 64  # rows of each client that are answered at once
    shown_examples: ClassVar[int] = 3  # of each client, unless the run says how many
    trivial_label: ClassVar[str] = ""
    recordable: ClassVar[bool] = False  # whether a pass of losses asks nothing of the device before its end
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
        return mean_loss(sums, common, personal, batch, self.rooms.training.rows, self.helpers)

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

        def answer(x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            return self.example_losses(model, x, y, batch)

        answered = answered_batches(
            answer,
            common,
            personal,
            rows,
            self.evaluation_batch,
            self.rooms.answering,
            question="losses" if self.recordable else "",
        )
        for (together, index, real, start), found in answered:
            width = len(index) // len(together)
            filling = torch.arange(width) >= torch.tensor(real).unsqueeze(1)
            # Nothing waits for the device here: it has the next batch's kernels before it is done with this one's.
            at, filling = (t.to(device, non_blocking=True) for t in (torch.tensor(together), filling))
            for whole, values in zip((losses, weights), found):
                part = values.double().view(len(together), -1).masked_fill(filling, torch.nan)
                whole[at, start : start + width] = part
        # Every example's loss times its weight, over the mean weight: the rows' mean is the weighted one.
        return (losses / weights.nanmean(1, keepdim=True)).to(common.device)

    def losses_and_predictions(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, clients: Sequence[int]
    ) -> tuple[Tensor, list[list[Prediction]] | None]:
        """The losses as `losses` has them, in an order that is always the same, and predictions where they come of that
        pass: a model that clients choose by both is then asked once."""
        return self.losses(model, common, personal, encoded, clients), None

    @abstractmethod
    def predict(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, *, final: bool = False
    ) -> list[list[Prediction]]:
        """What each client's model answers to each of its rows, in the rows' order.

        `final` asks for what is too costly to do during a run as well: generated text.
        """

    def make_room_to_write(self, model: TwoLevelModel, encoded: Encoded, memory: float) -> None:
        """Write no more texts at once than so many bytes hold; for tasks that write any."""

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

    @cached_property
    def rooms(self) -> Rooms:
        """How much of it shares a pass: all, until the device's memory says otherwise."""
        return Rooms.of()

    def in_rooms(self, rooms: Rooms) -> Self:
        """The same task for one trial, whose passes have room of their own; what it has to say is said by both."""
        _ = self._notes
        other = copy(self)
        other.rooms = rooms
        return other

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
