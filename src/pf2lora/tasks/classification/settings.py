"""Text classification: its settings, and how it reads rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pf2lora.data.client import Client
from pf2lora.data.files import Record, columns_of, find_column
from pf2lora.data.guessing import fewest_values, longest_texts
from pf2lora.errors import UserError, unknown
from pf2lora.settings import require_positive, setting
from pf2lora.tasks.classification import glue, movie_reviews
from pf2lora.tasks.classification.rows import (
    LABEL_COLUMNS,
    Columns,
    TextRow,
    check_labels,
    choose_columns,
    choose_texts,
    label_names,
    rows_of,
)
from pf2lora.tasks.settings import Dataset, TaskSettings

if TYPE_CHECKING:
    from pf2lora.tasks.classification.task import Classification

CLASS_WEIGHTS = ("none", "balanced")
PAIRS = "pairs"


@dataclass(frozen=True)
class ClassificationSettings(TaskSettings[TextRow]):
    """One text, or a pair of texts, with a label."""

    max_length: int = setting(128, "longest input in tokens")
    class_weights: str = setting(
        "none", "what a row's loss counts: none (each the same) or balanced, by each client's own labels"
    )
    text: str | None = setting(None, "column of the text (guessed)", column=True)
    pair: str | None = setting(None, "column of the second text (guessed)", column=True)
    label: str | None = setting(None, "column of the label (guessed)", column=True)

    name: ClassVar[str] = "classification"
    labelled: ClassVar[bool] = True
    datasets: ClassVar[Mapping[str, Dataset[Any]]] = glue.DATASETS | movie_reviews.DATASETS

    def __post_init__(self) -> None:
        require_positive(self, "max_length")
        if self.class_weights not in CLASS_WEIGHTS:
            raise unknown("class weights", self.class_weights, CLASS_WEIGHTS)

    def rows(
        self,
        records: Sequence[Record],
        like: Sequence[Record] | None = None,
        notes: list[str] | None = None,
    ) -> list[TextRow]:
        return rows_of(records, self.chosen(records if like is None else like))

    def chosen(self, records: Sequence[Record]) -> Columns:
        return choose_columns(columns_of(records), records[0].file, self.text, self.pair, self.label)

    def columns(self, records: Sequence[Record]) -> dict[str, str]:
        return {name: column for name, column in asdict(self.chosen(records)).items() if column}

    def likely_columns(self, records: Sequence[Record], besides: Sequence[str] = ()) -> dict[str, str]:
        there = [name for name in columns_of(records) if name not in besides]
        kept = [replace(record, values={c: record.values.get(c) for c in there}) for record in records]
        label = self.label or find_column(there, LABEL_COLUMNS) or fewest_values(kept, (self.text, self.pair))
        try:
            return replace(self, label=label).columns(kept)
        except UserError:
            if self.text is not None or self.pair is not None:
                raise
            return replace(self, text=longest_texts(kept, (label,)), label=label).columns(kept)

    def questions(
        self, records: Sequence[Record], labels: Sequence[str], traits: Sequence[str] = ()
    ) -> list[TextRow]:
        text, pair = choose_texts(columns_of(records), records[0].file, self.text, self.pair, self.label)
        if (pair is not None) != (PAIRS in traits):
            wanted = "pairs of texts" if PAIRS in traits else "single texts"
            raise UserError(f"{records[0].file}: the run's rows are {wanted}, and these are not")
        # Every row needs some label to be encoded with; nothing asks what it is.
        return [TextRow(r.text(text), labels[0], r.text(pair) if pair else None) for r in records]

    def typed(self, line: str, traits: Sequence[str] = ()) -> dict[str, Any]:
        text, pair = self.text or "text1", self.pair or "text2"
        if PAIRS not in traits:
            return {self.text or "text": line}
        first, *second = line.split("\t")
        if len(second) != 1:
            raise UserError(
                f"the run's rows are pairs of texts: give both with a tab between them, not {line!r}"
            )
        return {text: first, pair: second[0]}

    def build(self, model: str, labels: Sequence[str], metric: str | None = None) -> Classification:
        from pf2lora.adapters.base_model import load_tokenizer
        from pf2lora.tasks.classification.task import Classification

        return Classification(load_tokenizer(model), labels, self, metric=metric or "accuracy")

    def metric_names(self, labels: Sequence[str], metric: str | None = None) -> tuple[str, ...]:
        from pf2lora.tasks.classification.task import METRICS

        return tuple(METRICS)

    def labels(self, clients: Sequence[Client[TextRow]]) -> list[str]:
        return label_names(clients)

    def traits(self, clients: Sequence[Client[TextRow]]) -> list[str]:
        return [PAIRS] if any(row.pair is not None for client in clients for row in client.train) else []

    def check(
        self,
        clients: Sequence[Client[TextRow]],
        labels: Sequence[str],
        test_records: Mapping[str, Sequence[Record]] | None = None,
    ) -> None:
        check_labels(clients, labels, test_records)

    def record_columns(self, rows: Sequence[TextRow]) -> dict[str, str]:
        named = {"text": "text", "label": "label"}
        return named | ({"pair": "pair"} if any(row.pair is not None for row in rows) else {})

    def asked(self, row: TextRow) -> tuple[str, ...]:
        return (row.text, row.pair or "")

    def split_key(self, row: TextRow) -> str:
        return row.label

    def partition_key(self, row: TextRow) -> str:
        return row.label
