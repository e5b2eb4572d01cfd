"""Questions on texts: SQuAD v1 and v2 from the hub or their official JSON, and users' own files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora.data.client import Client
from pf2lora.data.files import (
    Record,
    choose_column,
    columns_of,
    expand_paths,
    find_column,
    read_json,
    read_records,
    require_column,
)
from pf2lora.data.held_out import clients_of
from pf2lora.data.partition import Parts, by_heterogeneity, client_names, make_clients
from pf2lora.data.per_client import check_name, records_per_client
from pf2lora.data.split import rng_for, split_rows
from pf2lora.errors import UserError, missing_extra, unknown


@dataclass(frozen=True)
class QuestionRow:
    """A question on a context and its answers, each with the place where it starts; no answers: it has none."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    topic: str = ""


@dataclass(frozen=True)
class SquadSet:
    """A version of SQuAD: its name on the hub and its official training file."""

    title: str
    hub: str
    file: str


SQUAD = {
    "squad": SquadSet("SQuAD v1.1", "rajpurkar/squad", "train-v1.1.json"),
    "squad_v2": SquadSet("SQuAD v2.0", "rajpurkar/squad_v2", "train-v2.0.json"),
}
PAPER_CLIENTS, PAPER_HETEROGENEITY, PAPER_TEST_RATIO = 4, 0.5, 0.2


def load_squad(
    name: str,
    path: str | Path | None = None,
    *,
    clients: int = PAPER_CLIENTS,
    heterogeneity: float = PAPER_HETEROGENEITY,
    test_ratio: float = PAPER_TEST_RATIO,
    seed: int = 0,
    notes: list[str] | None = None,
) -> list[Client[QuestionRow]]:
    """As in the paper: the training set split by question, 80% to train on and 20% to test on, both shared out by
    topic with `heterogeneity`. `path` is a JSON file, or a folder with the official one; without it, the hub."""
    rows = read_squad(name, path, notes)
    train, test = split_rows(rows, [""] * len(rows), test_ratio, rng_for(seed, "split"))

    def share(part: Sequence[QuestionRow]) -> Parts:
        return by_heterogeneity([row.topic for row in part], clients, heterogeneity, seed)

    return make_clients(train, test, share(train), share(test), client_names(clients))


def read_squad(
    name: str, path: str | Path | None = None, notes: list[str] | None = None
) -> list[QuestionRow]:
    """The questions of a SQuAD training set (or of whichever official JSON file `path` is)."""
    if name not in SQUAD:
        raise unknown("SQuAD set", name, SQUAD)
    if path is None:
        return _from_hub(SQUAD[name], notes)
    path = Path(path)
    file = path / SQUAD[name].file if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    return read_questions(file, notes)


def _from_hub(squad: SquadSet, notes: list[str] | None) -> list[QuestionRow]:
    try:
        import datasets
    except ImportError:
        purpose = f"{squad.title} from the hub (without it: --data-dir with {squad.file})"
        raise missing_extra("datasets", "hub", purpose) from None
    try:
        found = datasets.load_dataset(squad.hub, split="train")
    except Exception as error:  # the hub's failures have no common type
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{squad.title} cannot be had from the hub ({reason}); with --data-dir it is read from {squad.file}"
        ) from None
    records = [Record(dict(row), f"hub {squad.hub}", f"row {i}") for i, row in enumerate(found, 1)]
    return rows_of(records, Columns("context", "question", "answers", "title"), notes)


# --- files -----------------------------------------------------------------------------------------------

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


def load_clients(
    paths: Sequence[str | Path],
    *,
    context: str | None = None,
    question: str | None = None,
    answers: str | None = None,
    client_column: str | None = None,
    test: Sequence[str | Path] = (),
    test_ratio: float = 0.2,
    seed: int = 0,
    notes: list[str] | None = None,
) -> list[Client[QuestionRow]]:
    """All clients from files: one file per client (rows, or SQuAD's own JSON), or a column that names the client.

    Test rows come from `test` files (same stems, or same client column), else they are a seeded `test_ratio` of
    each client's questions.
    """
    named = (context, question, answers)
    train = _per_client(paths, client_column, named, notes)
    held_out = _per_client(test, client_column, named, notes) if test else None
    return clients_of(train, held_out, test_ratio, seed)


def _per_client(
    patterns: Sequence[str | Path],
    client_column: str | None,
    named: tuple[str | None, str | None, str | None],
    notes: list[str] | None,
) -> dict[str, list[QuestionRow]]:
    paths = expand_paths(patterns)
    if client_column is not None:
        records = records_per_client(paths, client_column)
        return {name: rows_of(own, choose_columns(own, *named), notes) for name, own in records.items()}
    clients: dict[str, list[QuestionRow]] = {}
    for path in paths:
        name = check_name(path.stem, path)
        if name in clients:
            raise UserError(f"{path}: two files would be client {name!r}: rename one of them")
        clients[name] = read_questions(path, notes, *named)
    return clients


def read_questions(
    path: str | Path,
    notes: list[str] | None = None,
    context: str | None = None,
    question: str | None = None,
    answers: str | None = None,
) -> list[QuestionRow]:
    """One file's questions: SQuAD's own JSON, or rows of jsonl, json, csv, tsv or parquet."""
    path = Path(path)
    if path.suffix.lower() == ".json" and path.is_file():
        document = read_json(path)
        if isinstance(document, dict):
            records = list(_official(document, str(path)))
            if not records:
                raise UserError(f"{path}: no questions in this file")
            return rows_of(records, Columns("context", "question", "answers", "title"), notes)
    records = read_records(path)
    return rows_of(records, choose_columns(records, context, question, answers), notes)


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
            value = json.loads(value)  # a list as a csv field holds it
        except json.JSONDecodeError:
            value = [value]  # a text that happens to begin with a bracket
    elif record.is_missing(column):
        value = []
    if isinstance(value, dict):  # the hub's form: {"text": […], "answer_start": […]}
        value = [
            {"text": text, "answer_start": start}
            for text, start in zip(value.get("text", ()), value.get("answer_start", ()))
        ]
    items = value if isinstance(value, list) else [value]
    texts, starts = [], []
    for item in items:
        text, start = (item.get("text"), item.get("answer_start")) if isinstance(item, dict) else (item, None)
        if not isinstance(text, str) or not text.strip() or not isinstance(start, int | None):
            raise UserError(
                f"{record.where}: {item!r} in {column!r} is not an answer (a text of the context)"
            )
        texts.append(text)
        starts.append(start)
    return texts, starts


def _place(record: Record, answer: str, stated: int | None, context: str) -> int:
    """Where the answer starts: at the stated place, or else at the nearest one (the first if none is stated)."""
    if stated is not None and context.startswith(answer, stated):
        return stated
    places, at = [], context.find(answer)
    while at >= 0:
        places.append(at)
        at = context.find(answer, at + 1)
    if not places:
        raise UserError(f"{record.where}: the answer {answer!r} is not in its context")
    return min(places, key=lambda place: abs(place - (stated or 0)))
