"""Prompts and what should follow them, from a user's own files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora.data.files import Record, choose_column, columns_of, find_column, read_records
from pf2lora.errors import UserError, shown
from pf2lora.parsing import BadJSON, parse_json, read_text

PROMPT_COLUMNS = ("prompt", "input", "source", "instruction", "mr", "context")
GROUP_COLUMNS = ("group", "category", "topic")
TARGET_COLUMNS = ("target", "targets", "references", "reference", "completion", "response", "output", "ref")


@dataclass(frozen=True)
class PromptRow:
    """A prompt and one or more texts that may follow it: each is trained on, and each is a reference."""

    prompt: str
    targets: tuple[str, ...]
    group: str = ""  # what clients are made by: a restaurant's name, a category


@dataclass(frozen=True)
class Columns:
    """Which columns hold the prompt, the target or targets, and the group where there is one."""

    prompt: str
    target: str
    group: str | None = None

    def row(self, record: Record) -> PromptRow:
        """The record as a row; an error that names its line if a text is missing."""
        group = str(record.values.get(self.group) or "") if self.group else ""
        return PromptRow(record.text(self.prompt), _targets(record, self.target), group)


def _targets(record: Record, column: str) -> tuple[str, ...]:
    """One text, or several: a JSON list, also as a csv field holds it."""
    value = record.values.get(column)
    texts: Any = [value]
    if isinstance(value, list):
        texts = value
    elif isinstance(value, str) and value.startswith("["):
        try:
            texts = parse_json(value)
        except BadJSON:
            texts = [value]  # a text that happens to begin with a bracket
    if record.is_missing(column) or not texts:
        raise UserError(f"{record.where}: empty target in column {column!r}")
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            what = f"{shown(text)}, not a text" if text and not isinstance(text, str) else "an empty target"
            raise UserError(f"{record.where}: column {column!r} holds {what}")
    return tuple(texts)


def choose_columns(records: Sequence[Record], prompt: str | None, target: str | None) -> Columns:
    """The columns that the user named; those not named are guessed."""
    columns, file = columns_of(records), records[0].file
    prompt = choose_column([c for c in columns if c != target], prompt, PROMPT_COLUMNS, file, "--prompt")
    rest = [c for c in columns if c != prompt]
    target = choose_column(rest, target, TARGET_COLUMNS, file, "--target")
    return Columns(prompt, target, find_column([c for c in rest if c != target], GROUP_COLUMNS))


def rows_of(records: Sequence[Record], columns: Columns) -> list[PromptRow]:
    there = columns_of(records)
    for name, flag in ((columns.prompt, "--prompt"), (columns.target, "--target")):
        choose_column(there, name, (), records[0].file, flag)
    return [columns.row(record) for record in records]


def read_prompts(path: str | Path, column: str | None = None) -> list[str]:
    """The prompts to continue: a text file's lines, or a data file's prompt column."""
    path = Path(path)
    if path.suffix.lower() in (".txt", ""):
        lines = [line for line in read_text(path).splitlines() if line.strip()]
        if not lines:
            raise UserError(f"{path}: no prompts in this file (one on each line)")
        return lines
    records = read_records(path)
    chosen = prompt_column(records, column)
    return [record.text(chosen) for record in records]


def prompt_column(records: Sequence[Record], named: str | None) -> str:
    """The column of the prompt, where nothing else is asked for."""
    return choose_column(columns_of(records), named, PROMPT_COLUMNS, records[0].file, "--prompt")


def grouped(rows: Iterable[PromptRow]) -> list[PromptRow]:
    """Rows with the same prompt as one row with all their targets, in the order of first appearance."""
    together: dict[str, list[PromptRow]] = {}
    for row in rows:
        together.setdefault(row.prompt, []).append(row)
    return [
        PromptRow(prompt, tuple(t for row in same for t in row.targets), same[0].group)
        for prompt, same in together.items()
    ]
