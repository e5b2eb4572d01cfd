"""Prompts and what should follow them, from a user's own files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora.data.files import (
    Record,
    choose_column,
    columns_of,
    find_column,
    read_records,
    require_column,
)
from pf2lora.errors import UserError, shown
from pf2lora.parsing import BadJSON, parse_json, read_text
from pf2lora.tasks.generation.conversations import Conversation
from pf2lora.tasks.generation.turns import (
    MessageColumn,
    conversation,
    exchange,
    group_of,
    learnable,
    message_column,
    unread_fields,
)

PROMPT_COLUMNS = ("prompt", "input", "source", "instruction", "mr", "context")
GROUP_COLUMNS = ("group", "category", "topic")
INSTRUCTION, CONTEXT_COLUMNS = "instruction", ("input", "context")  # as alpaca's files have them
COMPLETION = "completion"
TARGET_COLUMNS = ("target", "targets", "references", "reference", "completion", "response", "output", "ref")


@dataclass(frozen=True)
class PromptRow:
    """A prompt and one or more texts that may follow it: each is trained on, and each is a reference."""

    prompt: str
    targets: tuple[str, ...]
    group: str = ""  # what clients are made by: a restaurant's name, a category


@dataclass(frozen=True)
class Columns:
    """Which columns hold the prompt, what it is about (below an instruction), the target or targets, and the group;
    `chat` if that is an exchange between a user and an assistant."""

    prompt: str
    target: str | None
    context: str | None = None
    group: str | None = None
    chat: bool = False

    def row(self, record: Record) -> PromptRow | Conversation:
        """The record as a row; an error that names its line if a text is missing."""
        group = group_of(record, self.group)
        if self.chat:
            return learnable(exchange(record, self.prompt, self.context, self.target), record, group)
        assert self.target is not None
        return PromptRow(record.text(self.prompt), _targets(record, self.target), group)

    def question(self, record: Record) -> PromptRow | Conversation:
        """The record as a row to be answered."""
        if self.chat:
            return conversation(exchange(record, self.prompt, self.context, None), record)
        return PromptRow(record.text(self.prompt), ())


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


def choose_columns(
    records: Sequence[Record],
    prompt: str | None,
    target: str | None,
    messages: str | None = None,
    chat: bool | None = None,
) -> Columns | MessageColumn:
    """The columns that the user named; those not named are guessed. What is a `chat` follows from them, unless it is
    said: conversations, an instruction, a prompt with a completion."""
    columns, file = columns_of(records), records[0].file
    conversations = message_column(records, messages) if messages or not (prompt or target) else None
    if conversations is not None:
        if chat is False:
            raise UserError(
                f"{file}: column {conversations!r} holds conversations, which --no-chat cannot read"
            )
        require_column(conversations, columns, file, "--messages")
        rest = [c for c in columns if c != conversations]
        return MessageColumn(conversations, find_column(rest, GROUP_COLUMNS))
    instruction = find_column(columns, (INSTRUCTION,))
    if prompt is None and instruction is not None and instruction != target:
        prompt = instruction
    prompt = choose_column([c for c in columns if c != target], prompt, PROMPT_COLUMNS, file, "--prompt")
    rest = [c for c in columns if c != prompt]
    target = choose_column(rest, target, TARGET_COLUMNS, file, "--target")
    rest = [c for c in rest if c != target]
    context = find_column(rest, CONTEXT_COLUMNS) if prompt == instruction else None
    exchanged = prompt == instruction or (prompt.casefold(), target.casefold()) == ("prompt", COMPLETION)
    is_chat = exchanged if chat is None else chat
    return Columns(prompt, target, context if is_chat else None, find_column(rest, GROUP_COLUMNS), is_chat)


def rows_of(
    records: Sequence[Record], columns: Columns | MessageColumn, notes: list[str] | None = None
) -> list[PromptRow | Conversation]:
    there = columns_of(records)
    if isinstance(columns, MessageColumn):
        needed = [(columns.messages, "--messages")]
    else:
        needed = [(columns.prompt, "--prompt"), (columns.target or "", "--target")]
    for name, flag in needed:
        choose_column(there, name, (), records[0].file, flag)
    if isinstance(columns, MessageColumn) or columns.chat:
        unread = unread_fields(records, [name for name, _ in needed])
        line = f"fields of turns that are not read: {', '.join(map(repr, unread))}"
        if unread and notes is not None and line not in notes:
            notes.append(line)
    return [columns.row(record) for record in records]


def question_columns(
    records: Sequence[Record], prompt: str | None, messages: str | None, chat: bool
) -> Columns | MessageColumn:
    """The columns of what is asked, where nothing else is: for a run of a `chat`, or of plain prompts."""
    conversations = message_column(records, messages) if chat and not prompt else None
    if conversations is not None:
        require_column(conversations, columns_of(records), records[0].file, "--messages")
        return MessageColumn(conversations)
    columns = columns_of(records)
    instruction = find_column(columns, (INSTRUCTION,)) if chat else None
    found = choose_column(columns, prompt or instruction, PROMPT_COLUMNS, records[0].file, "--prompt")
    context = (
        find_column([c for c in columns if c != found], CONTEXT_COLUMNS) if found == instruction else None
    )
    return Columns(found, None, context, chat=chat)


def read_prompts(path: str | Path) -> tuple[list[str], list[Record]]:
    """What is to be continued: a text file's lines, or a data file's records."""
    path = Path(path)
    if path.suffix.lower() not in (".txt", ""):
        return [], read_records(path)
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path}: no prompts in this file (one on each line)")
    return lines, []


def grouped(rows: Iterable[PromptRow]) -> list[PromptRow]:
    """Rows with the same prompt as one row with all their targets, in the order of first appearance."""
    together: dict[str, list[PromptRow]] = {}
    for row in rows:
        together.setdefault(row.prompt, []).append(row)
    return [
        PromptRow(prompt, tuple(t for row in same for t in row.targets), same[0].group)
        for prompt, same in together.items()
    ]
