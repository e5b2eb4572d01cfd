"""Conversations as a model reads them: through its tokenizer's chat template, and where the assistant speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from pf2lora.errors import UserError, shown
from pf2lora.tasks.generation.conversations import ASSISTANT, Conversation, Message

PLAIN = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'].strip() }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers that have no template, such as GPT-2's."""

DATE = "26 Jul 2024"  # of templates that tell the model which day it is: a run can be repeated on another
MARK = "⟪turn {}⟫"


class Span(NamedTuple):
    """A part of a text that is the assistant's: what it says, and what ends its turn."""

    start: int
    stop: int


class Written(NamedTuple):
    """A conversation as text, and the assistant's turns in it; `ended` if something ends the last one."""

    text: str
    turns: list[Span]
    ended: bool


class ChatTemplate:
    """A tokenizer's chat template. What the user should know is told to `note`."""

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

    # --- text ----------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The template's text; `ask` ends it where the assistant's next turn begins."""
        turns = [asdict(message) for message in messages]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": ask, "date_string": DATE}
        return str(self.tokenizer.apply_chat_template(turns, chat_template=self.template, **options))

    def accepted(self, row: Conversation, *, ask: bool = False) -> tuple[Conversation, str]:
        """The conversation as the template takes it, and its text: what the system says goes to the next turn where a
        template knows no system."""
        from jinja2 import TemplateError

        try:
            return row, self.render(row.messages, ask=ask)
        except TemplateError as error:
            joined = row.without_system()
            try:
                text = self.render(joined.messages, ask=ask)
            except TemplateError:
                raise UserError(
                    f"the tokenizer's chat template refuses a conversation ({error}): it begins with "
                    f"{shown(row.messages[0].content)} and has the turns {', '.join(m.role for m in row.messages)}"
                ) from None
            self.note("the chat template knows no system: what it says stands at the top of the next turn")
            return joined, text

    def prompt(self, row: Conversation) -> str:
        """What the model reads before it writes its last turn."""
        return self.accepted(Conversation(row.asked), ask=True)[1]

    def written(self, row: Conversation) -> Written:
        """The conversation up to the end of the assistant's last turn, and where the assistant speaks.

        Templates need not mark that. With a mark in the place of each of its turns, the template shows what stands
        around them, whatever it does to earlier turns once there are later ones.
        """
        row, text = self.accepted(row)
        numbers = [i for i, message in enumerate(row.messages) if message.role == ASSISTANT]
        marked = [Message(m.role, MARK.format(i)) if i in numbers else m for i, m in enumerate(row.messages)]
        around = self.render(marked)
        turns: list[Span] = []
        at, ended = 0, False
        for i in numbers:
            before, found, around = around.partition(MARK.format(i))
            start = at + len(before)
            if not found or not text.startswith(before, at):
                raise UserError(
                    "the tokenizer's chat template leaves out, or changes, turns of a conversation"
                )
            at = self._end(text, start, row.messages[i].content, around)
            ended = bool(self.end) and around.startswith(self.end)
            turns.append(
                Span(self._beginning(text, start, row.messages[:i]), at + (len(self.end) if ended else 0))
            )
        return Written(text[: turns[-1].stop], turns, ended)

    def _beginning(self, text: str, start: int, before: Sequence[Message]) -> int:
        """Where the model begins to write: after the prompt that it gets, which may end before what it says does
        begin (a space, an empty thought). There is none where the assistant speaks first, or where a template writes no
        prompt after these turns."""
        prompt = self._prompt(before)
        if prompt is not None and text.startswith(prompt) and len(prompt) <= start:
            return len(prompt)
        return start - len(self.lead) if text.endswith(self.lead, 0, start) else start

    def _prompt(self, before: Sequence[Message]) -> str | None:
        from jinja2 import TemplateError

        try:
            return self.render(before, ask=True) if before else None
        except TemplateError:
            return None

    def _end(self, text: str, start: int, content: str, after: str) -> int:
        """Where what was said ends: as it stands, without blanks around it, or as the template changes it."""
        for said in (content, content.strip()):
            if text.startswith(said, start):
                return start + len(said)
        following = after.partition(MARK.partition("{")[0])[0]
        found = text.find(following, start) if following else len(text)
        return len(text) if found < 0 else found

    @cached_property
    def exchanged(self) -> tuple[str, str, str]:
        """A question and its answer: the prompt, what the template writes before the answer, and what behind it."""
        question = Message("user", "a")
        prompt = self.render((question,), ask=True)
        before, _, after = self.render((question, Message(ASSISTANT, MARK))).partition(MARK)
        return prompt, before, after

    @property
    def lead(self) -> str:
        """What the model writes before what it says, where the template's prompt does not hold it."""
        prompt, before, _ = self.exchanged
        return before.removeprefix(prompt) if before.startswith(prompt) else ""

    @cached_property
    def end(self) -> str:
        """What the template ends a turn of the assistant with: a special token, or nothing."""
        after = self.exchanged[2]
        blank = len(after) - len(after.lstrip())
        special = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        longest = sorted(filter(None, special), key=len, reverse=True)
        found = next((token for token in longest if after.startswith(token, blank)), None)
        return after[:blank] + found if found else ""

    # --- tokens --------------------------------------------------------------------------------------------

    def tokens(self, rows: Sequence[Conversation]) -> list[tuple[list[int], list[int]]]:
        """Each conversation's tokens, and for each of them whether it is the assistant's (1): a token belongs to the
        turn in which its last character stands. A last turn that nothing ends gets the end of text."""
        written = [self.written(row) for row in rows]
        if not written:
            return []
        found = self.tokenizer(
            [w.text for w in written], add_special_tokens=False, return_offsets_mapping=True
        )
        examples = []
        for (_, turns, ended), ids, offsets in zip(written, found["input_ids"], found["offset_mapping"]):
            target = [int(any(turn.start < stop <= turn.stop for turn in turns)) for _, stop in offsets]
            end = [] if ended else [self.tokenizer.eos_token_id]
            examples.append(([*ids, *end], [*target, *(1 for _ in end)]))
        return examples

    def prompts(self, rows: Sequence[Conversation]) -> list[list[int]]:
        """The tokens after which the model writes its last turn."""
        texts = [self.prompt(row) for row in rows]
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return found

    def stops(self) -> list[int]:
        """The tokens that end a turn: the end of text, and what the template writes."""
        ids = self.tokenizer(self.end.strip(), add_special_tokens=False)["input_ids"] if self.end else []
        return list(dict.fromkeys([self.tokenizer.eos_token_id, *ids]))
