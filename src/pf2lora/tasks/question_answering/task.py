"""Extractive question answering: the answer is a span of the context, or there is none.

A long context is read in overlapping windows. A window that does not hold the answer points at the [CLS] token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForQuestionAnswering, PreTrainedModel, PreTrainedTokenizerBase

from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.errors import UserError
from pf2lora.tasks.answering import predict_rows
from pf2lora.tasks.base import Example, Examples, Scores, Shown, Task, pad_columns
from pf2lora.tasks.question_answering.rows import QuestionRow
from pf2lora.tasks.question_answering.scores import exact_match, f1
from pf2lora.tasks.question_answering.settings import (
    ANSWERABLE,
    UNANSWERABLE,
    QuestionAnsweringSettings,
)
from pf2lora.tasks.settings import Metric

METRICS = {
    "f1": Metric("F1"),
    "exact_match": Metric("exact match"),
    "loss": Metric("test loss", higher_is_better=False, percent=False),
}
NO_ANSWER_METRICS = {
    "answerable_f1": Metric("F1, answerable"),
    "unanswerable_f1": Metric("F1, unanswerable"),
}
SHORTEST_STEP = 16  # tokens by which a window moves on, at least


def metrics_of(no_answers: bool) -> dict[str, Metric]:
    """The scores there are, where questions may have no answer and where each has one."""
    return METRICS | (NO_ANSWER_METRICS if no_answers else {})


class Answer(NamedTuple):
    """`no_answer` is the probability that there is none: the sigmoid of the [CLS] span's lead over the best one.

    `n_best` are the best spans with their scores, best first; `loss` is the mean over the row's windows.
    """

    text: str
    no_answer: float
    loss: float
    n_best: tuple[tuple[str, float], ...]


class Window(NamedTuple):
    """What a window says: the score of no answer, and its best spans as (score, first token, last token)."""

    null: float
    spans: list[tuple[float, int, int]]
    loss: float


@dataclass(frozen=True)
class WindowExamples(Examples):
    """Each example is a window; `offsets` are its tokens' places in the context, `contexts` those of all rows."""

    offsets: list[np.ndarray] = field(kw_only=True)
    contexts: list[list[str]] = field(kw_only=True)


class QuestionAnswering(Task[QuestionRow, Answer]):
    """`no_answers` says whether questions may be without an answer, as in SQuAD v2."""

    name: ClassVar[str] = "question-answering"
    peft_type: ClassVar[str | None] = "QUESTION_ANS"
    recordable: ClassVar[bool] = True
    trivial_label: ClassVar[str] = "never an answer"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: QuestionAnsweringSettings | None = None,
        *,
        no_answers: bool = False,
        evaluation_batch: int = 32,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                "question answering needs a fast tokenizer, which knows where its tokens stand in the text"
            )
        self.tokenizer, self.no_answers = tokenizer, no_answers
        self.labels = [ANSWERABLE, UNANSWERABLE] if no_answers else [ANSWERABLE]
        self.settings = settings or QuestionAnsweringSettings()
        max_length, stride = self.settings.max_length, self.settings.stride
        self.evaluation_batch = evaluation_batch
        self.metrics = metrics_of(no_answers)
        special = tokenizer.num_special_tokens_to_add(pair=True)
        room = max_length - special - stride - SHORTEST_STEP
        if room < 1:
            raise UserError(
                f"max_length {max_length} leaves no room for a question beside a stride of {stride} "
                f"tokens: a longer max_length or a shorter stride is needed"
            )
        self.question_room = room

    def load_model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        model = load_model(AutoModelForQuestionAnswering, name, dtype)
        limits = (getattr(model.config, "max_position_embeddings", None), self.tokenizer.model_max_length)
        longest = min(limit for limit in limits if limit)
        if self.settings.max_length > longest:
            raise UserError(f"max_length is {self.settings.max_length}, but the model takes {longest} tokens")
        return model

    # --- rows to tokens ----------------------------------------------------------------------------------

    def encode(self, clients: Sequence[Sequence[QuestionRow]], *, training: bool) -> WindowExamples:
        rows = [row for client in clients for row in client]
        tokens = self.tokenizer(
            self._fitting([row.question.strip() for row in rows], training),
            [row.context for row in rows],
            truncation="only_second",
            max_length=self.settings.max_length,
            stride=self.settings.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        row_of = np.array(tokens["overflow_to_sample_mapping"], dtype=np.int64)
        ends = np.cumsum([len(client) for client in clients])
        client_of = np.searchsorted(ends, row_of, side="right")
        first_row = np.concatenate([[0], ends])[client_of] if len(rows) else row_of
        spans = [self._spans(tokens, i, rows[row]) for i, row in enumerate(row_of)]
        names = ("start", "end", "cls", "context_start", "context_end")
        columns = pad_columns(
            tokens,
            self.tokenizer.pad_token_id,
            dict(zip(names, torch.tensor(spans).unbind(1))),
            np.bincount(client_of, minlength=len(clients)).tolist(),
        )
        return WindowExamples(
            **vars(columns),
            row_numbers=row_of - first_row,
            row_counts=tuple(map(len, clients)),
            offsets=[] if training else [np.array(o, dtype=np.int32) for o in tokens["offset_mapping"]],
            contexts=[] if training else [[row.context for row in client] for client in clients],
        )

    def _fitting(self, questions: list[str], training: bool) -> list[str]:
        """Questions that would leave the context no room are cut, and counted."""
        found = self.tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)
        cut = 0
        for i, offsets in enumerate(found["offset_mapping"]):
            if len(offsets) > self.question_room:
                questions[i] = questions[i][: offsets[self.question_room - 1][1]]
                cut += 1
        if cut:
            part = "training" if training else "test"
            self.note(
                f"{cut} {part} questions are cut to {self.question_room} tokens, to leave the context room"
            )
        return questions

    def _spans(self, tokens: Any, window: int, row: QuestionRow) -> tuple[int, int, int, int, int]:
        """The first and last token of the answer, the [CLS] token, and the context's tokens from … to (exclusive)."""
        ids, offsets = tokens["input_ids"][window], tokens["offset_mapping"][window]
        cls = ids.index(self.tokenizer.cls_token_id) if self.tokenizer.cls_token_id in ids else 0
        parts = tokens.sequence_ids(window)
        first, stop = (parts.index(1), len(parts) - parts[::-1].index(1)) if 1 in parts else (cls, cls)
        if not row.answers or first == stop:
            return cls, cls, cls, first, stop
        text = row.answers[0]
        begin, end = row.starts[0] + len(text) - len(text.lstrip()), row.starts[0] + len(text.rstrip())
        if begin < offsets[first][0] or end > offsets[stop - 1][1]:
            return cls, cls, cls, first, stop
        start = bisect_right(offsets, begin, first, stop, key=lambda place: place[1])
        last = bisect_left(offsets, end, first, stop, key=lambda place: place[0]) - 1
        return start, max(start, last), cls, first, stop

    # --- loss and answers --------------------------------------------------------------------------------

    def logits(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Scores of every token as the first and as the last of the answer; padding is never either."""
        inputs = {
            name: batch.tensors[name] for name in ("input_ids", "token_type_ids") if name in batch.tensors
        }
        out = model(common, personal, key=batch.key, attention_mask=batch.mask, **inputs)
        padding = batch.tensors["attention_mask"] == 0
        start, end = (
            logits.to(common.dtype).masked_fill(padding, -torch.inf)
            for logits in (out.start_logits, out.end_logits)
        )
        return start, end

    def example_losses(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy of start and end; every window counts as one."""
        losses = window_losses(*self.logits(model, common, personal, batch), batch)
        return losses, torch.ones_like(losses)

    def predict(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, *, final: bool = False
    ) -> list[list[Answer]]:
        assert isinstance(encoded, WindowExamples)

        def answer(common: Tensor, personal: Tensor, batch: Batch) -> list[Window]:
            start, end = self.logits(model, common, personal, batch)
            losses = window_losses(start, end, batch)
            spans = best_spans(start, end, batch, self.settings)
            cls = batch.tensors["cls"].unsqueeze(1)
            null = (start.gather(1, cls) + end.gather(1, cls)).squeeze(1)
            return [Window(*each) for each in zip(null.tolist(), spans, losses.tolist())]

        windows = predict_rows(answer, common, personal, encoded, self.evaluation_batch, self.rooms.answering)
        places = [encoded.offsets[start:stop] for start, stop in encoded.spans]
        found = encoded.by_row([list(zip(*both)) for both in zip(windows, places)])
        return [
            [self._answer(context, row) for context, row in zip(encoded.contexts[k], rows)]
            for k, rows in zip(encoded.clients, found)
        ]

    def _answer(self, context: str, windows: list[tuple[Window, np.ndarray]]) -> Answer:
        """The best span of all windows against no answer, which must be likely in every window."""
        spans: dict[tuple[int, int], float] = {}
        for window, offsets in windows:
            for score, first, last in window.spans:
                place = int(offsets[first][0]), int(offsets[last][1])
                spans[place] = max(score, spans.get(place, -np.inf))
        ranked = sorted(spans.items(), key=lambda item: -item[1])[: self.settings.n_best]
        null = min(window.null for window, _ in windows)
        lead = null - ranked[0][1] if ranked else np.inf
        probability = float(1 / (1 + np.exp(-np.clip(lead, -500, 500))))
        n_best = tuple((context[begin:end].strip(), score) for (begin, end), score in ranked)
        silent = not n_best or (self.no_answers and probability > self.settings.no_answer_threshold)
        loss = sum(window.loss for window, _ in windows) / len(windows)
        return Answer("" if silent else n_best[0][0], probability, loss, n_best)

    # --- scores ------------------------------------------------------------------------------------------

    def score(self, predictions: Sequence[Answer], rows: Sequence[QuestionRow]) -> Scores:
        """Exact match and F1 as the official script of v1.1 or v2.0 gives them, as fractions."""
        both = list(zip(predictions, rows))
        f1s = [f1(answer.text, row.answers, v2=self.no_answers) for answer, row in both]
        values: Scores = {
            "f1": mean(f1s),
            "exact_match": mean([exact_match(a.text, row.answers, v2=self.no_answers) for a, row in both]),
            "loss": mean([answer.loss for answer in predictions]),
            "answerable_f1": mean([value for value, row in zip(f1s, rows) if row.answers]),
            "unanswerable_f1": mean([value for value, row in zip(f1s, rows) if not row.answers]),
        }
        return {name: values[name] for name in self.metrics}

    def resampled(
        self, predictions: Sequence[Answer], rows: Sequence[QuestionRow], draws: np.ndarray
    ) -> np.ndarray | None:
        found = zip(predictions, rows)
        f1s = np.array([f1(answer.text, row.answers, v2=self.no_answers) for answer, row in found])
        return f1s[draws].mean(1)

    def trivial(self, train: Sequence[QuestionRow], test: Sequence[QuestionRow]) -> Scores | None:
        """Where questions may be without an answer, none to any of them."""
        if not self.no_answers:
            return None
        return self.score([Answer("", 1.0, np.nan, ())] * len(test), test) | {"loss": None}

    def describe(self, rows: Sequence[QuestionRow]) -> dict[str, int]:
        counts = Counter(row.topic for row in rows if row.topic)
        return {topic: counts[topic] for topic in sorted(counts)}

    def show(self, row: QuestionRow) -> Shown:
        """The first window that holds the answer, or else the first."""
        encoded = self.encode([[row]], training=True)
        start, end, cls = (encoded.row_columns[name].tolist() for name in ("start", "end", "cls"))
        at = next((i for i, place in enumerate(start) if place != cls[i]), 0)
        marked = [start[at] <= i <= end[at] for i in range(int(encoded.lengths[at]))]
        found = f"answer: {row.answers[0]}" if row.answers else "no answer: the mark is on the first token"
        return self.shown(encoded, at, marked, f"window {at + 1} of {len(start)}; {found}")

    def input_text(self, row: QuestionRow) -> str:
        return f"{row.question} {row.context}"

    def answer(self, prediction: Answer, row: QuestionRow) -> dict[str, Any]:
        silent = {"no_answer_probability": prediction.no_answer} if self.no_answers else {}
        return {"predicted": prediction.text} | silent

    def example(self, prediction: Answer, row: QuestionRow) -> Example | None:
        nothing = "(no answer)"
        golds = tuple(dict.fromkeys(row.answers)) or (nothing,)  # several people often answered alike
        return Example(row.question, golds, prediction.text or nothing)


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def window_losses(start: Tensor, end: Tensor, batch: Batch) -> Tensor:
    """Each window's loss, (N,)."""
    first = cross_entropy(start, batch.tensors["start"], reduction="none")
    return (first + cross_entropy(end, batch.tensors["end"], reduction="none")) / 2


def best_spans(
    start: Tensor, end: Tensor, batch: Batch, settings: QuestionAnsweringSettings
) -> list[list[tuple[float, int, int]]]:
    """Each window's best spans of the context, best first: (score, first token, last token)."""
    at = torch.arange(start.shape[1], device=start.device)
    low, high = (batch.tensors[name].unsqueeze(1) for name in ("context_start", "context_end"))
    outside = (at < low) | (at >= high)
    longest = settings.max_answer_tokens
    starts = start.masked_fill(outside, -torch.inf)
    ends = pad(end.masked_fill(outside, -torch.inf), (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    scores = (starts.unsqueeze(2) + ends).flatten(1)  # every start with every length
    best, index = scores.topk(min(settings.n_best, scores.shape[1]))
    first = index // longest
    return [
        [span for span in zip(*window) if span[0] > -torch.inf]
        for window in zip(best.tolist(), first.tolist(), (first + index % longest).tolist())
    ]
