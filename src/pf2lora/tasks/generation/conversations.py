"""Conversations: turns of a system, a user and an assistant, who is to be learned from. How they are read from files is
`turns.py`, how a model reads them `template.py` and `chat.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

ASSISTANT = "assistant"
ROLES = {  # what data calls them, and what chat templates do
    **dict.fromkeys(("user", "human", "prompter", "customer"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard", "ai"), ASSISTANT),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
THOUGHT, CALLS = "reasoning_content", "tool_calls"


@dataclass(frozen=True)
class Message:
    """A turn: who speaks ("system", "user", "assistant", "tool"), what is said, and what else chat templates may write
    of it: a thought, calls of tools. One of the assistant's that is not `learned` is read like the others' turns."""

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    learned: bool = True

    @property
    def said(self) -> str:
        """What is said, to be read: of a turn that calls tools alone, the calls."""
        return self.content or "\n".join(called(call) for call in self.more.get(CALLS, ()))

    @property
    def is_to_learn(self) -> bool:
        return self.role == ASSISTANT and self.learned


def called(call: Mapping[str, Any]) -> str:
    """A call of a tool as JSON: its name and its arguments."""
    return json.dumps(call.get("function", call), ensure_ascii=False)


@dataclass(frozen=True)
class Conversation:
    """Turns, of which the assistant's are learned from, and the tools that it may call. To be tested, or answered, it
    is asked for its last one."""

    messages: tuple[Message, ...]
    group: str = ""  # what clients are made by: a topic, a category
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    where: str = field(default="", compare=False, repr=False)  # its file and line, for error messages

    @property
    def asked(self) -> tuple[Message, ...]:
        """The turns before the assistant's last one: all of them, where it has not answered."""
        return self.messages[:-1] if self.messages[-1].role == ASSISTANT else self.messages

    @property
    def prompt(self) -> str:
        """What is asked, to be read: a single question as it stands, several turns with who speaks."""
        if len(self.asked) == 1:
            return self.asked[0].said
        return "\n".join(f"{m.role}: {m.said}" for m in self.asked)

    @property
    def targets(self) -> tuple[str, ...]:
        """The assistant's last turn."""
        return (self.messages[-1].said,) if self.messages[-1].role == ASSISTANT else ()

    def before(self, number: int) -> Conversation:
        return replace(self, messages=self.messages[:number])

    def changed(self, number: int, change: Callable[[Message], Message]) -> Conversation:
        """The same with another turn in the place of one."""
        turns = [change(m) if i == number else m for i, m in enumerate(self.messages)]
        return replace(self, messages=tuple(turns))

    def without_system(self) -> Conversation:
        """The same with what the system says at the top of the next turn, for templates that know no system; not of the
        assistant's, which would learn to say it."""
        first, *rest = self.messages
        if first.role != "system" or not rest or rest[0].role == ASSISTANT:
            return self
        return replace(self, messages=(replace(rest[0], content=joined(first, rest[0])), *rest[1:]))

    def alternating(self) -> Conversation:
        """The same with what somebody says in several turns as one, for templates that want turns to alternate; of the
        assistant's those that are learned alike."""
        turns = list(self.messages[:1])
        for last, turn in pairwise(self.messages):
            alike = (last.role, last.learned) == (turn.role, turn.learned)
            if alike and turn.role != "tool" and not last.more and not turn.more:
                turns[-1] = replace(turns[-1], content=joined(turns[-1], turn))
            else:
                turns.append(turn)
        return replace(self, messages=tuple(turns))


def joined(first: Message, second: Message) -> str:
    return f"{first.content}\n\n{second.content}"
