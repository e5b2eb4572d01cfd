"""Rows of question answering: questions on texts, from users' own files or SQuAD's own JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora.data import files
from pf2lora.data.files import Record, choose_column, columns_of, find_column, require_column
from pf2lora.errors import UserError, check_path, reading, shown
from pf2lora.parsing import BadJSON, parse_json


@dataclass(frozen=True)
class QuestionRow:
    """A question on a context and its answers, each with the place where it starts; no answers: it has none."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    topic: str = ""


CONTEXT_COLUMNS = ("context", "passage", "text", "document", "paragraph")
QUESTION_COLUMNS = ("question", "query")
ANSWER_COLUMNS = ("answers", "answer")
TOPIC_COLUMNS = ("title", "topic")


@dataclass(frozen=True)
class Columns:
    """Which columns hold the context, the question, its answers, and its topic if there is one."""

    context: str
    question: str
    answers: str
    topic: str | None = None


def read_records(path: str | Path) -> list[Record]:
    """One file's records: SQuAD's own JSON, or rows of jsonl, json, csv, tsv or parquet."""
    path = Path(path)
    with reading(check_path(path)):
        may_be_official = files.kind_of(path) == ".json" and path.is_file()
    if may_be_official:
        document = files.json_document(path)
        if isinstance(document, dict):
            records = list(_official(document, str(path)))
            if not records:
                raise UserError(f"{path}: no questions in this file")
            return records
    return files.read_records(path)


def _official(document: Mapping[str, Any], file: str) -> Iterator[Record]:
    """The questions of SQuAD's own JSON, as records that know their place in it."""
    for article_place, article in _items(document, "data", "", file):
        for paragraph_place, paragraph in _items(article, "paragraphs", f"{article_place}.", file):
            for place, raw in _items(paragraph, "qas", f"{paragraph_place}.", file):
                shared = {"context": paragraph.get("context"), "title": article.get("title", "")}
                yield Record(shared | raw, file, place)


def _items(
    parent: Mapping[str, Any], key: str, prefix: str, file: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    items = parent.get(key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UserError(
            f"{file}: {prefix}{key} is no list of objects (SQuAD's format: data > paragraphs > qas)"
        )
    for number, item in enumerate(items):
        yield f"{prefix}{key}[{number}]", item


def questions_of(records: Sequence[Record], context: str | None, question: str | None) -> list[QuestionRow]:
    """Records as questions without answers: what is to be found, whether it is there or not."""
    columns, file = columns_of(records), records[0].file
    on = choose_column(columns, context, CONTEXT_COLUMNS, file, "--context")
    asked = choose_column([c for c in columns if c != on], question, QUESTION_COLUMNS, file, "--question")
    return [
        QuestionRow(str(r.values.get("id") or r.where), r.text(on), r.text(asked), (), ()) for r in records
    ]


def choose_columns(
    records: Sequence[Record], context: str | None, question: str | None, answers: str | None
) -> Columns:
    """The columns that the user named; those not named are guessed."""
    columns, file = columns_of(records), records[0].file
    return Columns(
        choose_column(columns, context, CONTEXT_COLUMNS, file, "--context"),
        choose_column(columns, question, QUESTION_COLUMNS, file, "--question"),
        choose_column(columns, answers, ANSWER_COLUMNS, file, "--answers"),
        find_column(columns, TOPIC_COLUMNS),
    )


# --- records to rows -------------------------------------------------------------------------------------


def rows_of(records: Sequence[Record], columns: Columns, notes: list[str] | None = None) -> list[QuestionRow]:
    """Records as rows. Answers that are elsewhere in their context than stated are found there and counted in
    `notes`; an answer that is not in its context is an error."""
    there = columns_of(records)
    for name in (columns.context, columns.question, columns.answers):
        require_column(name, there, records[0].file)
    rows, moved = [], 0
    for record in records:
        context, question = record.text(columns.context), record.text(columns.question)
        texts, stated = _answers(record, columns.answers)
        starts = [_place(record, text, start, context) for text, start in zip(texts, stated)]
        moved += any(start is not None and start != found for start, found in zip(stated, starts))
        topic = str(record.values.get(columns.topic) or "") if columns.topic else ""
        name = str(record.values.get("id") or record.where)
        rows.append(QuestionRow(name, context, question, tuple(texts), tuple(starts), topic))
    if moved and notes is not None:
        notes.append(
            f"{records[0].file}: {moved} questions have answers that are not at their stated place; "
            f"the nearest place in the context is taken"
        )
    return rows


def _answers(record: Record, column: str) -> tuple[list[str], list[int | None]]:
    """Answers and their stated starts from any of the usual forms; no answer is none, empty or an empty list."""
    value = record.values.get(column)
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            value = parse_json(value)  # a list as a csv field holds it
        except BadJSON:
            value = [value]  # a text that happens to begin with a bracket
    elif record.is_missing(column):
        value = []
    if isinstance(value, dict):  # the hub's form: {"text": […], "answer_start": […]}
        texts, starts = value.get("text", []), value.get("answer_start", [])
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise UserError(
                f"{record.where}: {column!r} must have lists of the same length, 'text' and 'answer_start'"
            )
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts)]
    items = value if isinstance(value, list) else [value]
    texts, starts = [], []
    for item in items:
        text, start = (item.get("text"), item.get("answer_start")) if isinstance(item, dict) else (item, None)
        placed = start is None or (type(start) is int and start >= 0)
        if not isinstance(text, str) or not text.strip() or not placed:
            raise UserError(
                f"{record.where}: {shown(item)} in {column!r} is not an answer (a text of the context)"
            )
        texts.append(text)
        starts.append(start)
    return texts, starts


def _place(record: Record, answer: str, stated: int | None, context: str) -> int:
    """Where the answer starts: at the stated place, or else at the nearest one (the first if none is stated)."""
    stated = min(stated or 0, len(context))
    before, after = context.rfind(answer, 0, stated + len(answer)), context.find(answer, stated)
    places = [place for place in (before, after) if place >= 0]
    if not places:
        raise UserError(f"{record.where}: the answer {shown(answer)} is not in its context")
    return min(places, key=lambda place: abs(place - stated))
