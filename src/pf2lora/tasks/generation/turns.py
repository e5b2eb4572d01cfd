"""Conversations from a user's own files.

`messages` with role and content, ShareGPT's `conversations` with from and value, and a single exchange that stands in
columns: `prompt` and `completion`, or alpaca's `instruction`, `input` and `output`, with what was said before it in
`history`. Beside any of them, `system` is what the system says, and `tools` describes what the assistant may call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pf2lora.data.files import Record, columns_of, find_column
from pf2lora.errors import UserError, listed, shown
from pf2lora.parsing import BadJSON, parse_json
from pf2lora.tasks.generation.conversations import ASSISTANT, CALLS, ROLES, THOUGHT, Conversation, Message

MESSAGE_COLUMNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns")
SYSTEM_COLUMNS = ("system", "system_prompt")
HISTORY_COLUMNS, TOOLS_COLUMNS = ("history",), ("tools",)
WHO, SAID = ("role", "from"), ("content", "value")
THOUGHTS = (THOUGHT, "reasoning", "thinking")
WRITTEN = ("name", "tool_call_id")  # as they stand, by templates that know them
WEIGHT = "weight"  # OpenAI's: 0 is read and not learned
READ = (*WHO, *SAID, *THOUGHTS, *WRITTEN, CALLS, WEIGHT)


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
        row = conversation(self._messages(record), record)
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
    found = from_json(value)
    return found if are_turns(found) else value  # a text may be a list of something else


def from_json(value: Any) -> Any:
    """What a text says that is a list or an object in JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except BadJSON:
            return value
    return value


def are_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)


def unread_fields(records: Sequence[Record], columns: Sequence[str | None]) -> list[str]:
    """The fields of turns in these columns that nothing here knows."""
    lists = (listed_turns(record.values.get(column)) for record in records for column in columns if column)
    turns = (turn for value in lists if are_turns(value) for turn in value)
    return list(
        dict.fromkeys(key for turn in turns for key, value in turn.items() if value and key not in READ)
    )


# --- rows --------------------------------------------------------------------------------------------------


def conversation(messages: Sequence[Message], record: Record, group: str = "") -> Conversation:
    """The turns with what stands beside them in the record: what the system says first, and tools."""
    system = find_column(list(record.values), SYSTEM_COLUMNS)
    if system and not record.is_missing(system):
        first = Message("system", record.text(system))
        own = messages[0] if messages and messages[0].role == "system" else None
        if own is None:
            messages = (first, *messages)
        elif own.content.strip() != first.content.strip():
            both = replace(own, content=f"{first.content}\n\n{own.content}")
            messages = (both, *messages[1:])
    return Conversation(tuple(messages), group, tools_of(record), record.where)


def learnable(messages: Sequence[Message], record: Record, group: str = "") -> Conversation:
    """The conversation up to the assistant's last turn that is learned, before which somebody must have asked."""
    last = max((i for i, message in enumerate(messages) if message.is_to_learn), default=None)
    if last is None:
        ignored = any(message.role == ASSISTANT for message in messages)
        why = f": all have {WEIGHT!r} 0" if ignored else ""
        raise UserError(f"{record.where}: no turn of the assistant to learn from{why}")
    if not last:
        raise UserError(f"{record.where}: nobody asks before the assistant answers")
    return conversation(messages[: last + 1], record, group)


def tools_of(record: Record) -> tuple[Mapping[str, Any], ...]:
    column = find_column(list(record.values), TOOLS_COLUMNS)
    if column is None or record.is_missing(column):
        return ()
    found = from_json(record.values[column])
    if not are_turns(found):
        raise UserError(
            f"{record.where}: column {column!r} holds {shown(record.values[column])}, not a list of descriptions of "
            f'tools like [{{"type": "function", "function": …}}]'
        )
    return tuple(found)


def history_of(record: Record) -> list[Message]:
    """Earlier questions and their answers, as alpaca's rows have them: a list of pairs."""
    column = find_column(list(record.values), HISTORY_COLUMNS)
    if column is None or record.is_missing(column):
        return []
    found = from_json(record.values[column])
    pairs = found if isinstance(found, list) else [found]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(
                f"{record.where}: column {column!r} holds {shown(pair)}, not a list of pairs [question, answer]"
            )
    return [Message(role, text) for pair in pairs for role, text in zip(("user", ASSISTANT), pair)]


def exchange(record: Record, prompt: str, context: str | None, target: str | None) -> tuple[Message, ...]:
    """A question, with its context below it, and the answer; either may be a list of turns itself."""
    said = history_of(record)
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


# --- turns -------------------------------------------------------------------------------------------------


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
    who, said = first_of(turn, WHO), first_of(turn, SAID)
    if who is None:
        raise UserError(f"{where}: nobody is named by 'role' or 'from'")
    role = ROLES.get(who.strip().lower()) if isinstance(who, str) else None
    if role is None:
        raise UserError(f"{where}: {shown(who)} is no role (known: {listed(ROLES)})")
    more = written_beside(turn, where)
    if isinstance(said, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in said):
        said = "\n".join(part["text"] for part in said)  # as some servers log it: a list of parts
    silent = said in (None, []) or (isinstance(said, str) and not said.strip())
    if silent and (
        CALLS in more or role == "tool"
    ):  # a call says nothing else, and some tools answer nothing
        said = ""
    elif silent or not isinstance(said, str):
        raise UserError(
            f"{where}: the {role} {'says nothing' if silent else f'says {shown(said)}, not a text'}"
        )
    return Message(role, said, more, weight_of(turn, where))


def first_of(turn: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((turn[key] for key in keys if turn.get(key) is not None), None)


def written_beside(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a turn has beside its text for a chat template to write."""
    more: dict[str, Any] = {key: turn[key] for key in WRITTEN if turn.get(key)}
    thought = first_of(turn, THOUGHTS)
    if thought is not None and not isinstance(thought, str):
        raise UserError(f"{where}: the thought is {shown(thought)}, not a text")
    if thought and thought.strip():
        more[THOUGHT] = thought
    calls = from_json(turn.get(CALLS))
    if calls:
        if not are_turns(calls):
            raise UserError(f"{where}: {CALLS!r} holds {shown(calls)}, not a list of calls")
        more[CALLS] = [with_arguments(call) for call in calls]
    return more


def with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write as JSON: OpenAI's format has them as a text."""
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": with_arguments(inner)}
    return {**call, "arguments": from_json(call["arguments"])} if "arguments" in call else dict(call)


def weight_of(turn: Mapping[str, Any], where: str) -> bool:
    weight = turn.get(WEIGHT)
    if weight not in (None, 0, 1):
        raise UserError(f"{where}: {WEIGHT!r} is {shown(weight)}; it is 0 (read, not learned) or 1")
    return weight != 0


def as_turn(message: Message) -> dict[str, Any]:
    """A turn as `message_of` reads it."""
    weight = {} if message.learned else {WEIGHT: 0}
    return {"role": message.role, "content": message.content, **message.more, **weight}
