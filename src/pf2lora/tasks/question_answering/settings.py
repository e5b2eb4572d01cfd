"""Extractive question answering: its settings, and how it reads rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pf2lora.data.client import Client
from pf2lora.data.files import Record
from pf2lora.errors import UnknownLabel, UserError
from pf2lora.settings import require_positive, setting
from pf2lora.tasks.question_answering import squad
from pf2lora.tasks.question_answering.rows import (
    Columns,
    QuestionRow,
    choose_columns,
    questions_of,
    read_records,
    rows_of,
)
from pf2lora.tasks.settings import Dataset, TaskSettings

if TYPE_CHECKING:
    from pf2lora.tasks.question_answering.task import QuestionAnswering

ANSWERABLE, UNANSWERABLE = "answer", "no answer"


@dataclass(frozen=True)
class QuestionAnsweringSettings(TaskSettings[QuestionRow]):
    """How contexts are read and answers are picked; where questions may have no answer, none is given if its
    probability is above `no_answer_threshold`."""

    max_length: int = setting(384, "longest input in tokens")
    stride: int = setting(128, "tokens that neighbouring windows of a long context share")
    max_answer_tokens: int = setting(30, "longest answer in tokens")
    n_best: int = setting(20, "best spans that are kept")
    no_answer_threshold: float = setting(0.5, "no answer is given if its probability is above this")
    context: str | None = setting(None, "column of the context (guessed)", column=True)
    question: str | None = setting(None, "column of the question (guessed)", column=True)
    answers: str | None = setting(None, "column of the answers (guessed)", column=True)

    name: ClassVar[str] = "question-answering"
    datasets: ClassVar[Mapping[str, Dataset[Any]]] = squad.DATASETS

    def __post_init__(self) -> None:
        require_positive(self, "max_length", "max_answer_tokens", "n_best")
        if self.stride < 0:
            raise UserError(f"stride is {self.stride}; it must be at least 0")

    def read_records(self, path: str | Path) -> list[Record]:
        return read_records(path)

    def rows(
        self,
        records: Sequence[Record],
        like: Sequence[Record] | None = None,
        notes: list[str] | None = None,
    ) -> list[QuestionRow]:
        # By each client's own columns: one may have SQuAD's own JSON, another a csv file.
        return rows_of(records, self.chosen(records), notes)

    def chosen(self, records: Sequence[Record]) -> Columns:
        return choose_columns(records, self.context, self.question, self.answers)

    def columns(self, records: Sequence[Record]) -> dict[str, str]:
        found = self.chosen(records)
        return {"context": found.context, "question": found.question, "answers": found.answers}

    def questions(
        self, records: Sequence[Record], labels: Sequence[str], traits: Sequence[str] = ()
    ) -> list[QuestionRow]:
        return questions_of(records, self.context, self.question)

    def typed(self, line: str, traits: Sequence[str] = ()) -> dict[str, Any]:
        asked, *context = line.split("\t", 1)
        if not context:
            raise UserError(
                "a question needs its context: give both with a tab between them, or --file with columns for both"
            )
        return {self.context or "context": context[0], self.question or "question": asked}

    def build(self, model: str, labels: Sequence[str], metric: str | None = None) -> QuestionAnswering:
        from pf2lora.adapters.base_model import load_tokenizer
        from pf2lora.tasks.question_answering.task import QuestionAnswering

        return QuestionAnswering(load_tokenizer(model), self, no_answers=UNANSWERABLE in labels)

    def metric_names(self, labels: Sequence[str], metric: str | None = None) -> tuple[str, ...]:
        from pf2lora.tasks.question_answering.task import metrics_of

        return tuple(metrics_of(UNANSWERABLE in labels))

    def labels(self, clients: Sequence[Client[QuestionRow]]) -> list[str]:
        silent = any(not row.answers for client in clients for row in [*client.train, *client.test])
        return [ANSWERABLE, UNANSWERABLE] if silent else [ANSWERABLE]

    def agreed(self, labels: Sequence[str]) -> list[str]:
        """Whether questions may have no answer; they have one where nobody says anything."""
        if not {ANSWERABLE, *labels} <= {ANSWERABLE, UNANSWERABLE}:
            raise UserError(
                f'question answering has the labels "{ANSWERABLE}" and, where questions may have none, '
                f'"{UNANSWERABLE}": --labels "{ANSWERABLE},{UNANSWERABLE}"'
            )
        return [ANSWERABLE, UNANSWERABLE] if UNANSWERABLE in labels else [ANSWERABLE]

    def check(
        self,
        clients: Sequence[Client[QuestionRow]],
        labels: Sequence[str],
        test_records: Mapping[str, Sequence[Record]] | None = None,
    ) -> None:
        if UNANSWERABLE in labels:
            return
        for client in clients:
            for row in [*client.train, *client.test]:
                if not row.answers:
                    raise UnknownLabel(
                        f"client {client.name!r}: the question {row.question!r} has no answer, but the run knows only "
                        f'answerable ones (in a federation: --labels "{ANSWERABLE},{UNANSWERABLE}")'
                    )

    def to_record(self, row: QuestionRow) -> dict[str, Any]:
        answers = [{"text": text, "answer_start": start} for text, start in zip(row.answers, row.starts)]
        asked = {"id": row.id, "context": row.context, "question": row.question, "title": row.topic}
        return asked | {"answers": answers}

    def asked(self, row: QuestionRow) -> tuple[str, ...]:
        return (row.context, row.question)

    def partition_key(self, row: QuestionRow) -> str:
        return row.topic
