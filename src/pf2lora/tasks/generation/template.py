"""A tokenizer's chat template: what it takes of a conversation, and what text it makes of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from pf2lora.errors import UserError, shown
from pf2lora.tasks.generation.conversations import ASSISTANT, CALLS, THOUGHT, Conversation, Message, called
from pf2lora.tasks.generation.thoughts import parted, with_thought

PLAIN = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'].strip() }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers that have no template, such as GPT-2's."""

DATE, TODAY = "26 Jul 2024", date(2024, 7, 26)
"""The day that templates tell the model: rows are the same tokens on another, also where a run is resumed."""

CODES = {"-d": "26", "-m": "7"} | {code: TODAY.strftime(f"%{code}") for code in "aAbBdHIjmMpSuwyY"}
SAID = "".join(f".replace('%{code}', '{day}')" for code, day in CODES.items())
CLOCK = f"{{% macro strftime_now(format) %}}{{{{ format{SAID} }}}}{{% endmacro %}}"
"""The same day for templates that ask transformers for it; a function given to them would reach them as a text."""

MARKS = range(0xE000, 0xF8FF)  # characters that no standard gives a meaning


class Template:
    """A tokenizer's chat template: a conversation as text. What the user should know is told to `note`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None]) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                "conversations need a fast tokenizer, which knows where its tokens stand in a text"
            )
        self.tokenizer, self.note = tokenizer, note
        self.template = None if tokenizer.chat_template else self._plain()

    def _plain(self) -> str:
        self.note(
            "the tokenizer has no chat template: turns are written as 'User: …' and 'Assistant: …', each on a line"
        )
        first = self.tokenizer("a")["input_ids"][
            0
        ]  # a model that expects its beginning-of-text token gets it
        return ("{{ bos_token }}" if first == self.tokenizer.bos_token_id else "") + PLAIN

    def render(self, row: Conversation, *, ask: bool = False) -> str:
        """The template's text; `ask` ends it where the assistant's next turn begins."""
        turns = [self._turn(message) for message in row.messages]
        return self._render(turns, self._described(row), ask=ask)

    def _described(self, row: Conversation) -> list[dict[str, Any]]:
        """The tools that the template is given."""
        if row.tools and not self.writes_tools:
            self.note("the chat template describes no tools: the descriptions of rows are left out")
            return []
        return [dict(tool) for tool in row.tools]

    def _render(
        self, turns: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, ask: bool = False
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                turns,
                tools=list(tools) or None,
                chat_template=self._source(tools),
                tokenize=False,
                add_generation_prompt=ask,
                date_string=DATE,
            )
        )

    def _source(self, tools: Sequence[dict[str, Any]]) -> str:
        """The template's own text; some tokenizers have one for conversations with tools."""
        source = self.template or self.tokenizer.get_chat_template(tools=list(tools) or None)
        return CLOCK + source if "strftime_now" in source else source

    def _turn(self, message: Message) -> dict[str, Any]:
        """A turn as the template takes it. What it does not write of a turn becomes a part of the text."""
        more, said = dict(message.more), message.content
        if CALLS in more and not self.writes_calls:
            self.note("the chat template writes no calls of tools: they stand as <tool_call> in what is said")
            calls = [f"<tool_call>\n{called(call)}\n</tool_call>" for call in more.pop(CALLS)]
            said = "\n".join([said, *calls] if said else calls)
        if message.role == ASSISTANT and thought_of(message):
            if self.writes_thoughts:
                more[THOUGHT], said = thought_of(message), parted(said)[1]
            elif more.pop(THOUGHT, None):
                said = with_thought(thought_of(message), said)
        return {"role": message.role, "content": said, **more}

    @cached_property
    def writes_thoughts(self) -> bool:
        return self._writes(lambda mark: {THOUGHT: mark})

    @cached_property
    def writes_calls(self) -> bool:
        return self._writes(
            lambda mark: {
                CALLS: [{"id": "a", "type": "function", "function": {"name": mark, "arguments": {}}}]
            }
        )

    def _writes(self, more: Callable[[str], dict[str, Any]]) -> bool:
        """Whether a field of the assistant's turn reaches the text."""
        mark = chr(MARKS[0])
        turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b", **more(mark)}]
        try:
            return mark in self._render(turns)
        except refusals():
            return False

    @cached_property
    def writes_tools(self) -> bool:
        mark = chr(MARKS[0])
        parameters = {"type": "object", "properties": {}}
        tool = {"name": mark, "description": "b", "parameters": parameters}
        try:
            return mark in self._render(
                [{"role": "user", "content": "a"}], [{"type": "function", "function": tool}], ask=True
            )
        except refusals():
            return False

    @cached_property
    def system_before(self) -> bool | None:
        """Whether what the system says is written before the first of two questions; None if nowhere."""
        system, first = chr(MARKS[0]), chr(MARKS[1])
        said = [("system", system), ("user", first), (ASSISTANT, "b"), ("user", "c")]
        try:
            text = self._render([{"role": role, "content": words} for role, words in said], ask=True)
        except refusals():
            return None
        return text.index(system) < text.find(first) if system in text else None

    def _with_system(self, row: Conversation) -> Conversation:
        """The conversation with what the system says where the template writes it."""
        if self.system_before:
            return row
        if self.system_before is not None:
            self.note(
                "the chat template writes what the system says into the last turn of the user, not the first"
            )
            return row
        moved = row.without_system()
        self.note(
            "the chat template knows no system: what it says stands at the top of the next turn"
            if moved != row
            else "the chat template knows no system: what it says before the assistant speaks first is left out"
        )
        return moved

    def accepted(self, row: Conversation, *, ask: bool = False) -> tuple[Conversation, str]:
        """The conversation as the template takes it, and its text: what the system says goes to the next turn where a
        template knows no system, and several turns of one speaker become one where it wants them to alternate."""
        given = row
        if row.messages[0].role == "system":
            row = self._with_system(row)
        try:
            return row, self.render(row, ask=ask)
        except refusals() as refused:
            error = refused
        try:
            joined = row.alternating()
            text = self.render(joined, ask=ask)
        except refusals():
            raise UserError(
                f"{f'{row.where}: ' if row.where else ''}the tokenizer's chat template refuses a conversation "
                f"({error}): it begins with {shown(given.messages[0].said)} and has the turns "
                f"{', '.join(m.role for m in given.messages)}"
            ) from None
        self.note(
            "the chat template wants turns to alternate: several of the same one after another become one"
        )
        return joined, text

    def prompt(self, row: Conversation) -> str:
        """What the model reads before it writes its last turn."""
        return self.accepted(replace(row, messages=row.asked), ask=True)[1]


def refusals() -> tuple[type[Exception], ...]:
    """What a template raises that does not take a conversation, also one that it did not think of."""
    from jinja2 import TemplateError

    return TemplateError, TypeError, ValueError, LookupError, AttributeError


def thought_of(message: Message) -> str:
    """What the assistant thought, in a field of its own or before what it says."""
    return str(message.more.get(THOUGHT, "")).strip() or parted(message.content)[0]
