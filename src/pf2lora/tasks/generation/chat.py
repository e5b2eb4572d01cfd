"""Where the assistant speaks in a conversation that a chat template has written, and its tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

from pf2lora.errors import UserError
from pf2lora.tasks.generation.conversations import ASSISTANT, Conversation, Message
from pf2lora.tasks.generation.template import DATE, MARKS, Template, refusals, thought_of
from pf2lora.tasks.generation.thoughts import BEGUN, CLOSE, parted

OTHERWISE = (
    "the chat template asks for an answer with other words than it writes before one: in training, too, the last "
    "answer stands behind what it is asked with"
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PART_OF_TAG = re.compile(r"</?\w*$")


class Span(NamedTuple):
    """A part of a text that is the assistant's: what it says, and what ends its turn."""

    start: int
    stop: int


class Written(NamedTuple):
    """A conversation as text, and the assistant's turns in it; `ended` if something ends the last one."""

    text: str
    turns: list[Span]
    ended: bool


class ChatTemplate(Template):
    """A chat template, and which tokens of what it writes are the assistant's."""

    def written(self, row: Conversation) -> Written:
        """The conversation up to the end of the assistant's last turn, and where the assistant speaks: what it is asked
        with when it is tested (`prompt`), and what it is to write then.

        Templates need not mark where that is. With a mark in the place of a turn, the template shows what stands around
        it, whatever it does to earlier turns once there are later ones.
        """
        row, whole = self.accepted(row)
        *earlier, last = [i for i, message in enumerate(row.messages) if message.is_to_learn]
        start, stop = self._said(row, whole, last)
        answer = Span(self._lead(whole, start), stop)
        asked = self._prompt(row.before(last))
        if asked is None:
            text, begins = whole[: self._behind_end(whole, answer.stop)], answer.start
            turns = [self._earlier(row, whole, i) for i in earlier]
        else:
            if whole.startswith(asked) and len(asked) <= answer.stop:
                text = whole[: self._behind_end(whole, answer.stop)]
            else:
                self.note(OTHERWISE)
                text = asked + self._answered(asked, row.messages[last], whole[answer.start : answer.stop])
                text += self.end
            begins = len(asked)
            turns = [self._earlier(row.before(last), asked, i, ask=True) for i in earlier]
        turns.append(Span(begins, len(text)))
        if GENERATION.search(self._source(self._described(row))) and whole.startswith(text):
            turns = [part for turn in turns for part in self._marked(row, text, turn)]
        if any(
            thought_of(row.messages[i]) not in text[slice(*turn)] for i, turn in zip([*earlier, last], turns)
        ):
            self.note("the chat template leaves out thoughts, as of earlier turns: those are not learned")
        return Written(text, turns, bool(self.end) and text.endswith(self.end))

    def _marked(self, row: Conversation, text: str, turn: Span) -> list[Span]:
        """The parts of a turn that the template itself says are the assistant's, and what ends them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = self._described(row)
        options: dict[str, Any] = {
            "tools": tools or None,
            "date_string": DATE,
        } | self.tokenizer.special_tokens_map
        rendered = render_jinja_template(
            [[self._turn(message) for message in row.messages]],
            chat_template=self._source(tools),
            return_assistant_tokens_mask=True,
            **options,
        )
        (spans,) = cast(tuple[Any, list[list[tuple[int, int]]]], rendered)[1]
        inside = [(start, stop) for start, stop in spans if turn.start <= start and stop <= turn.stop]
        return [Span(start, self._behind_end(text, stop)) for start, stop in inside] or [turn]

    def _behind_end(self, text: str, at: int) -> int:
        """What ends a turn belongs to it."""
        return at + len(self.end) * text.startswith(self.end, at)

    def _answered(self, asked: str, message: Message, said: str) -> str:
        """What the assistant says after a prompt that may have begun its thought, or ended an empty one."""
        begun = BEGUN.search(asked)
        if begun is None:
            return said
        thought, answer = thought_of(message), parted(message.content)[1]
        if begun[1] == CLOSE:
            return answer
        return f"{thought}\n{CLOSE}\n\n{answer}" if thought else f"{CLOSE}\n\n{answer}"

    def _earlier(self, row: Conversation, text: str, number: int, *, ask: bool = False) -> Span:
        """An earlier turn of the assistant's. It begins after the prompt that the model gets, which may end before what
        it says does begin (a space, an empty thought). There is none where the assistant speaks first, or where a
        template writes no prompt after these turns."""
        said = self._said(row, text, number, ask=ask)
        stop = self._behind_end(text, said.stop)
        prompt = self._prompt(row.before(number))
        if prompt is not None and text.startswith(prompt) and len(prompt) <= said.stop:
            return Span(len(prompt), stop)
        return Span(self._lead(text, said.start), stop)

    def _lead(self, text: str, start: int) -> int:
        return start - len(self.lead) if text.endswith(self.lead, 0, start) else start

    def _prompt(self, before: Conversation) -> str | None:
        try:
            return self.render(before, ask=True) if before.messages else None
        except refusals():
            return None

    def _said(self, row: Conversation, text: str, number: int, *, ask: bool = False) -> Span:
        """Where what one turn says stands in the conversation's text: where that differs if something else is said."""
        mark = next(chr(code) for code in MARKS if chr(code) not in text)
        around = self.render(row.changed(number, lambda turn: Message(turn.role, mark)), ask=ask)
        before, found, after = around.partition(mark)
        if not found:
            raise UserError(
                f"{f'{row.where}: ' if row.where else ''}the tokenizer's chat template leaves out, or changes, turns "
                f"of a conversation"
            )
        start = len(before)
        if not text.startswith(before):
            start = len(PART_OF_TAG.sub("", text[: alike(before, text)]))
        stop = len(text) - (len(after) if text.endswith(after) else alike(after[::-1], text[::-1]))
        return Span(start, max(start, stop))

    @cached_property
    def exchanged(self) -> tuple[str, str, str]:
        """A question and its answer: the prompt, what the template writes before the answer, and what behind it."""
        question, mark = Message("user", "a"), chr(MARKS[0])
        prompt = self.render(Conversation((question,)), ask=True)
        before, _, after = self.render(Conversation((question, Message(ASSISTANT, mark)))).partition(mark)
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


def alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
