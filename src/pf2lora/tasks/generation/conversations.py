"""Conversations from a user's own files: turns of a system, a user and an assistant, who is to be learned from.

`messages` with role and content, ShareGPT's `conversations` with from and value, and a single exchange that stands in
columns: `prompt` and `completion`, or alpaca's `instruction`, `input` and `output`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pf2lora.data.files import Record, columns_of, find_column
from pf2lora.errors import UserError, listed, shown
from pf2lora.parsing import BadJSON, parse_json

MESSAGE_COLUMNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns")
SYSTEM_COLUMNS = ("system", "system_prompt")
ASSISTANT = "assistant"
ROLES = {  # what data calls them, and what chat templates do
    **dict.fromkeys(("user", "human", "prompter", "customer"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard", "ai"), ASSISTANT),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


@dataclass(frozen=True)
class Message:
    """A turn: who speaks ("system", "user", "assistant", "tool"), and what is said."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Turns, of which the assistant's are learned from. To be tested, or answered, it is asked for its last one."""

    messages: tuple[Message, ...]
    group: str = ""  # what clients are made by: a topic, a category

    @property
    def asked(self) -> tuple[Message, ...]:
        """The turns before the assistant's last one: all of them, where it has not answered."""
        return self.messages[:-1] if self.messages[-1].role == ASSISTANT else self.messages

    @property
    def prompt(self) -> str:
        """What is asked, to be read: a single question as it stands, several turns with who speaks."""
        if len(self.asked) == 1:
            return self.asked[0].content
        return "\n".join(f"{m.role}: {m.content}" for m in self.asked)

    @property
    def targets(self) -> tuple[str, ...]:
        """The assistant's last turn."""
        return (self.messages[-1].content,) if self.messages[-1].role == ASSISTANT else ()

    def without_system(self) -> Conversation:
        """The same with what the system says at the top of the next turn, for templates that know no system; not of the
        assistant's, which would learn to say it."""
        first, *rest = self.messages
        if first.role != "system" or not rest or rest[0].role == ASSISTANT:
            return self
        joined = Message(rest[0].role, f"{first.content}\n\n{rest[0].content}")
        return replace(self, messages=(joined, *rest[1:]))


@dataclass(frozen=True)
class MessageColumn:
    """Conversations that stand in one column, and the group where there is one."""

    messages: str
    group: str | None = None

    def row(self, record: Record) -> Conversation:
        """The conversation up to the assistant's last turn; an error that names the line if there is none."""
        return learnable(self._messages(record), record, group_of(record, self.group))

    def question(self, record: Record) -> Conversation:
        """The conversation up to what is to be answered: an answer at its end is not looked at."""
        row = Conversation(tuple(self._messages(record)))
        if not row.asked:
            raise UserError(f"{record.where}: column {self.messages!r} asks nothing")
        return replace(row, messages=row.asked)

    def _messages(self, record: Record) -> list[Message]:
        return messages_of(record.values.get(self.messages), f"{record.where}: column {self.messages!r}")


def group_of(record: Record, column: str | None) -> str:
    return str(record.values.get(column) or "") if column else ""


def message_column(records: Sequence[Record], named: str | None) -> str | None:
    """The column of conversations: the one that was named, or one that is called so and holds a list of turns."""
    if named is not None:
        return named
    column = find_column(columns_of(records), MESSAGE_COLUMNS)
    values = (record.values.get(column) for record in records if column and not record.is_missing(column))
    return column if are_turns(listed_turns(next(values, None))) else None


def listed_turns(value: Any) -> Any:
    """A list of turns, also as a csv field or a parquet text holds it: as JSON. Anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = parse_json(value)
        except BadJSON:
            return value
        return found if are_turns(found) else value  # a text may be a list of something else
    return value


def are_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)


def learnable(messages: Sequence[Message], record: Record, group: str = "") -> Conversation:
    """The conversation up to the assistant's last turn, before which somebody must have asked."""
    last = max((i for i, m in enumerate(messages) if m.role == ASSISTANT), default=None)
    if last is None:
        raise UserError(f"{record.where}: no turn of the assistant to learn from")
    if not last:
        raise UserError(f"{record.where}: nobody asks before the assistant answers")
    return Conversation(tuple(messages[: last + 1]), group)


def messages_of(value: Any, where: str) -> list[Message]:
    """The turns of a conversation, checked one by one; `where` names the column they stand in."""
    turns = listed_turns(value)
    if not isinstance(turns, list) or not turns:
        what = "no turns" if turns in (None, "", []) else f"{shown(turns)}, not a list of turns"
        raise UserError(f'{where} holds {what}; a conversation is [{{"role": …, "content": …}}, …]')
    return [message_of(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)]


def message_of(turn: Any, where: str) -> Message:
    """A turn as `{"role": …, "content": …}` or `{"from": …, "value": …}`."""
    if not isinstance(turn, dict):
        raise UserError(f'{where}: {shown(turn)} is no turn like {{"role": …, "content": …}}')
    who = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    said = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), None)
    if who is None:
        raise UserError(f"{where}: nobody is named by 'role' or 'from'")
    role = ROLES.get(who.strip().lower()) if isinstance(who, str) else None
    if role is None:
        raise UserError(f"{where}: {shown(who)} is no role (known: {listed(ROLES)})")
    if isinstance(said, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in said):
        said = "\n".join(part["text"] for part in said)  # as some servers log it: a list of parts
    if not isinstance(said, str) or not said.strip():
        what = (
            "says nothing"
            if said in (None, [], "") or isinstance(said, str)
            else f"says {shown(said)}, not a text"
        )
        raise UserError(f"{where}: the {role} {what}")
    return Message(role, said)


def exchange(record: Record, prompt: str, context: str | None, target: str | None) -> tuple[Message, ...]:
    """A question, with its context below it, and the answer; either may be a list of turns itself."""
    system = find_column(list(record.values), SYSTEM_COLUMNS)
    said = [Message("system", record.text(system))] if system and not record.is_missing(system) else []
    if are_turns(listed_turns(record.values.get(prompt))):
        said += messages_of(record.values[prompt], f"{record.where}: column {prompt!r}")
    else:
        asked = record.text(prompt)
        if context and not record.is_missing(context):
            asked = f"{asked}\n\n{record.text(context)}"
        said.append(Message("user", asked))
    if target is None:
        return tuple(said)
    if are_turns(listed_turns(record.values.get(target))):
        return (*said, *messages_of(record.values[target], f"{record.where}: column {target!r}"))
    if record.is_missing(target):
        raise UserError(f"{record.where}: empty target in column {target!r}")
    return (*said, Message(ASSISTANT, record.text(target)))
