"""Sequence classification: one text, or a pair of texts, with a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.tasks.answering import predict_rows
from pf2lora.tasks.base import Example, Scores, Shown, Task, pad_columns
from pf2lora.tasks.classification.rows import TextRow
from pf2lora.tasks.classification.scores import (
    NO_ANSWER,
    accuracy,
    answers,
    log_loss,
    matthews,
    row_losses,
)
from pf2lora.tasks.classification.settings import ClassificationSettings
from pf2lora.tasks.classification.weights import COLUMN, balanced_weights, row_weights
from pf2lora.tasks.settings import Metric

METRICS = {
    "accuracy": Metric("accuracy"),
    "matthews": Metric("Matthews correlation"),
    "loss": Metric("test loss", higher_is_better=False, percent=False),
}


class Classification(Task[TextRow, np.ndarray]):
    """`labels` are the label names in the order of the model's outputs. A prediction is a row of logits."""

    name: ClassVar[str] = "classification"
    peft_type: ClassVar[str | None] = "SEQ_CLS"
    recordable: ClassVar[bool] = True
    shown_examples: ClassVar[int] = 0  # they are clients' texts: they are kept where somebody asks for them
    trivial_label: ClassVar[str] = "majority label"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
        settings: ClassificationSettings | None = None,
        *,
        metric: str = "accuracy",
        evaluation_batch: int = 64,
    ) -> None:
        self.tokenizer, self.labels = tokenizer, list(labels)
        self.settings = settings or ClassificationSettings()
        self.evaluation_batch = evaluation_batch
        self.metrics = {metric: METRICS[metric]} | METRICS

    def load_model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        model = load_model(
            AutoModelForSequenceClassification,
            name,
            dtype,
            num_labels=len(self.labels),
            id2label=dict(enumerate(self.labels)),
            label2id={label: i for i, label in enumerate(self.labels)},
        )
        model.config.pad_token_id = self.tokenizer.pad_token_id
        return model

    def encode(self, clients: Sequence[Sequence[TextRow]], *, training: bool) -> Encoded:
        rows = [row for client in clients for row in client]
        pairs = [row.pair or "" for row in rows] if any(row.pair is not None for row in rows) else None
        tokens = self.tokenizer(
            [r.text for r in rows], pairs, truncation=True, max_length=self.settings.max_length
        )
        number = {label: i for i, label in enumerate(self.labels)}
        labels = torch.tensor([number[row.label] for row in rows])
        encoded = pad_columns(
            tokens, self.tokenizer.pad_token_id, {"labels": labels}, [len(client) for client in clients]
        )
        return self.weighed(encoded, encoded) if training else encoded

    def weighed(self, encoded: Encoded, train: Encoded) -> Encoded:
        if self.settings.class_weights == "none":
            return encoded
        found = row_weights(encoded, balanced_weights(train, len(self.labels)))
        return replace(encoded, row_columns=encoded.row_columns | {COLUMN: found})

    def example_losses(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits(model, common, personal, batch)
        losses = cross_entropy(logits, batch.tensors["labels"], reduction="none")
        weights = batch.tensors.get(COLUMN)
        if weights is None:
            return losses, torch.ones_like(losses)
        weights = weights.to(losses)
        return losses * weights, weights

    def logits(self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch) -> Tensor:
        inputs = {name: t for name, t in batch.tensors.items() if name not in ("labels", COLUMN)} | {
            "attention_mask": batch.mask
        }
        logits: Tensor = model(common, personal, key=batch.key, **inputs).logits
        return logits.to(common.dtype)

    def predict(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, *, final: bool = False
    ) -> list[list[np.ndarray]]:
        def answer(common: Tensor, personal: Tensor, batch: Batch) -> tuple[Tensor]:
            return (self.logits(model, common, personal, batch).double(),)

        return predict_rows(
            answer,
            common,
            personal,
            encoded,
            self.evaluation_batch,
            self.rooms.answering,
            question="logits",
            read=lambda found: found[0].cpu().numpy(),
        )

    def losses_and_predictions(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, clients: Sequence[int]
    ) -> tuple[Tensor, list[list[np.ndarray]] | None]:
        rows = encoded.of(clients)
        found = self.predict(model, common, personal, rows)
        labels, weights = (rows.row_columns.get(name) for name in ("labels", COLUMN))
        assert labels is not None
        losses = torch.full((len(found), max(map(len, found), default=0)), torch.nan, dtype=torch.float64)
        for own, logits, (start, stop) in zip(losses, found, rows.spans):
            if logits:
                of_rows = torch.from_numpy(np.stack(logits))
                each = cross_entropy(of_rows, labels[start:stop].to(of_rows.device), reduction="none")
                if weights is not None:
                    weight = weights[start:stop].to(each)
                    each = each * weight / weight.mean()
                own[: len(logits)] = each
        return losses, found

    def score(self, predictions: Sequence[np.ndarray], rows: Sequence[TextRow]) -> Scores:
        logits = np.stack(predictions)
        gold = np.array([self.labels.index(row.label) for row in rows])
        found = answers(logits)
        values: Scores = {
            "accuracy": accuracy(gold, found),
            "matthews": matthews(gold, found),
            "loss": log_loss(gold, logits),
        }
        return {name: values[name] for name in self.metrics}

    def show(self, row: TextRow) -> Shown:
        return self.shown(self.encode([[row]], training=True), about=f"label: {row.label}")

    def input_text(self, row: TextRow) -> str:
        return row.text if row.pair is None else f"{row.text} {row.pair}"

    def resampled(
        self, predictions: Sequence[np.ndarray], rows: Sequence[TextRow], draws: np.ndarray
    ) -> np.ndarray | None:
        gold = np.array([self.labels.index(row.label) for row in rows])
        headline = next(iter(self.metrics))
        if headline == "loss":
            return row_losses(gold, np.stack(predictions))[draws].mean(1)
        found = answers(np.stack(predictions))
        if headline == "accuracy":
            return (found == gold)[draws].mean(1)
        scores = [matthews(gold[rows], found[rows]) for rows in draws]
        return None if any(score is None for score in scores) else np.array(scores)

    def answer(self, prediction: np.ndarray, row: TextRow) -> dict[str, Any]:
        shares = np.exp(prediction - prediction.max())
        shares /= shares.sum()
        best = int(answers(prediction[None])[0])
        found = {"predicted": self.labels[best], "probability": float(shares[best])}
        return found | {f"probability_{label}": float(share) for label, share in zip(self.labels, shares)}

    def examples(
        self, predictions: Sequence[np.ndarray], rows: Sequence[TextRow], most: int
    ) -> list[Example]:
        """Those that were wrong, the surest first."""
        if not most or not rows:
            return []
        wrong = []
        for i, (logits, row) in enumerate(zip(predictions, rows)):
            found = self.answer(logits, row)
            if found["predicted"] != row.label:
                wrong.append((-found["probability"], i, found))
        return [
            Example(
                "\n".join(filter(None, (rows[i].text, rows[i].pair))),
                (rows[i].label,),
                f"{found['predicted']} ({found['probability']:.0%})",
                i,
            )
            for _, i, found in sorted(wrong, key=lambda w: w[:2])[:most]
        ]

    def confusion(self, predictions: Sequence[np.ndarray], rows: Sequence[TextRow]) -> list[list[int]] | None:
        """None where an output is no number, which is no answer either."""
        gold = np.array([self.labels.index(row.label) for row in rows])
        found = answers(np.stack(predictions))
        if (found == NO_ANSWER).any():
            return None
        counts = np.zeros((len(self.labels),) * 2, dtype=int)
        np.add.at(counts, (gold, found), 1)
        return counts.tolist()

    def trivial(self, train: Sequence[TextRow], test: Sequence[TextRow]) -> Scores | None:
        """Always the label that is most frequent in the client's training rows, with their shares for probabilities (a
        label that they lack counts for half a row)."""
        counts = Counter(row.label for row in train)
        shares = np.log([counts[label] or 0.5 for label in self.labels])
        return self.score([shares] * len(test), test)

    def describe(self, rows: Sequence[TextRow]) -> dict[str, int]:
        counts = Counter(row.label for row in rows)
        return {label: counts[label] for label in self.labels}
