"""Rows as tokens: what a model reads, which of its tokens carry loss, and what did not fit the window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from pf2lora.engines.batches import Encoded
from pf2lora.errors import UserError
from pf2lora.tasks.base import Examples, pad_columns
from pf2lora.tasks.generation.chat import ChatTemplate
from pf2lora.tasks.generation.conversations import Conversation
from pf2lora.tasks.generation.packing import pack
from pf2lora.tasks.generation.settings import GenerationSettings, TextRow
from pf2lora.tasks.generation.thoughts import parted
from pf2lora.tasks.generation.tokens import Tokens

LEAST = 2  # target tokens that an example must keep in its window: one, and the end of its text


@dataclass(frozen=True)
class PromptExamples(Examples):
    """Each example is a prompt with one of its targets; `prompts` are the rows' prompts alone, to be continued."""

    prompts: Encoded = field(kw_only=True)

    def of(self, clients: Sequence[int]) -> Self:
        return replace(super().of(clients), prompts=self.prompts.of(clients))


class Encoder:
    """Tokens of rows, for one tokenizer. What the user should know is told to `note`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings,
        note: Callable[[str], None],
        *,
        chat: bool = False,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token, so a generated text would never end")
        self.tokenizer, self.settings, self.note = tokenizer, settings, note
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.separator = self._separator(settings.separator)
        self.writes_turns = chat

    def _separator(self, text: str | None) -> list[int]:
        if text is not None:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        first = self.tokenizer.bos_token_id
        return [self.tokenizer.eos_token_id if first is None else first]

    def encode(self, clients: Sequence[Sequence[TextRow]], *, training: bool) -> Encoded:
        """The rows of clients side by side, as `PromptExamples`, or packed to be trained on. An example whose window
        has no room for a target is left out."""
        rows = [row for client in clients for row in client]
        examples = self.examples(rows)
        kept: list[Tokens] = []
        row_numbers, sizes, full, cut, lost = [], [0] * len(clients), 0, 0, 0
        places = ((k, i) for k, client in enumerate(clients) for i in range(len(client)))
        for (owner, number), own in zip(places, examples):
            fitting = [(e, e.cut(self.settings.max_length)) for e in own]
            fitting = [(e, short) for e, short in fitting if sum(short.target) >= min(LEAST, sum(e.target))]
            full += bool(own) and not fitting
            for example, short in fitting:
                missing = sum(example.target) - sum(short.target)
                cut, lost = cut + bool(missing), lost + missing
                kept.append(short)
                row_numbers.append(number)
                sizes[owner] += 1
        self.report(len(rows), full, cut, lost, sizes, training)
        if training and self.settings.packing and len(kept) > 1:
            return self.packed(kept, sizes)
        tokens = {"input_ids": [e.ids for e in kept], "target": [e.target for e in kept]}
        prompts = self.prompts(rows)
        asked = [len(ids) for row, ids in zip(rows, prompts) if not row.targets]
        if too_long := sum(length >= self.settings.max_length for length in asked):
            self.note(
                f"{too_long} of {len(asked)} prompts are cut at the left to fit the window of "
                f"{self.settings.max_length} tokens (max_length): the model reads their last part"
            )
        return PromptExamples(
            **vars(pad_columns(tokens, self.pad, {}, sizes)),
            row_numbers=np.array(row_numbers),
            row_counts=tuple(map(len, clients)),
            prompts=self.prompt_columns(prompts, [len(client) for client in clients]),
        )

    def packed(self, examples: Sequence[Tokens], sizes: Sequence[int]) -> Encoded:
        """The clients' examples, several in a row of the window's length."""
        starts = [0, *accumulate(sizes)]
        columns, rows = pack([examples[a:b] for a, b in pairwise(starts)], self.settings.max_length)
        self.note(
            f"{len(examples)} training examples are packed into {sum(rows)} rows of at most "
            f"{self.settings.max_length} tokens, of which --batch-size counts (the fewest of a client: {min(rows)})"
        )
        return replace(pad_columns(columns, self.pad, {}, rows), examples=tuple(sizes))

    @cached_property
    def chat(self) -> ChatTemplate:
        """How conversations are written."""
        return ChatTemplate(self.tokenizer, self.note)

    @property
    def stops(self) -> list[int]:
        """The tokens after which nothing more is written."""
        return self.chat.stops() if self.writes_turns else [self.tokenizer.eos_token_id]

    def compared(self, text: str) -> str:
        """What of a text is compared with a reference's: in a conversation the answer, without the thought before it
        and what stands behind the end of its turn."""
        if not self.writes_turns:
            return text
        for end in self.stops:
            text = text.partition(str(self.tokenizer.convert_ids_to_tokens(end)))[0]
        return parted(text)[1]

    def examples(self, rows: Sequence[TextRow]) -> list[list[Tokens]]:
        """Each row's examples, as long as they are: a conversation, or a prompt with each of its targets."""
        targets = iter(
            self._target_tokens([t for row in rows if not isinstance(row, Conversation) for t in row.targets])
        )
        chats = [row for row in rows if isinstance(row, Conversation) and row.targets]
        conversations = iter(self.chat.tokens(chats) if chats else [])
        return [
            [Tokens(*next(conversations)) for _ in row.targets]
            if isinstance(row, Conversation)
            else [
                Tokens(prompt + target, [0] * len(prompt) + [1] * len(target))
                for target in (next(targets) for _ in row.targets)
            ]
            for row, prompt in zip(rows, self.prompts(rows))
        ]

    def prompts(self, rows: Sequence[TextRow]) -> list[list[int]]:
        """Prompts with the separator; the model's own beginning-of-text token comes first where it uses one. Of a
        conversation, all before the assistant's last turn."""
        plain = [row.prompt for row in rows if not isinstance(row, Conversation)]
        chats = [row for row in rows if isinstance(row, Conversation)]
        tokens: list[list[int]] = self.tokenizer(plain)["input_ids"] if plain else []
        eos = self.tokenizer.eos_token_id
        found = iter((ids[:-1] if ids and ids[-1] == eos else ids) + self.separator for ids in tokens)
        asked = iter(self.chat.prompts(chats) if chats else [])
        return [next(asked if isinstance(row, Conversation) else found) for row in rows]

    def _target_tokens(self, targets: Sequence[str]) -> list[list[int]]:
        """A target follows a space, as words do in running text, and ends with the end of text."""
        for target in targets:
            if not target.strip():
                raise UserError("an empty target: there is nothing to learn from it")
        texts = [target if target[0].isspace() else f" {target}" for target in targets]
        found = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [[*ids, self.tokenizer.eos_token_id] for ids in found]

    def prompt_columns(self, prompts: Sequence[list[int]], sizes: list[int]) -> Encoded:
        """Prompts that fill the window are cut at the left: what they ask for usually stands at the end."""
        room = self.settings.max_length - 1
        return pad_columns({"input_ids": [ids[-room:] for ids in prompts]}, self.pad, {}, sizes)

    def report(self, rows: int, full: int, cut: int, lost: int, sizes: list[int], training: bool) -> None:
        part = "training" if training else "test"
        window = f"the window of {self.settings.max_length} tokens"
        if full:
            consequence = (
                "they are left out of training"
                if training
                else "they have no loss, and their text follows the prompt's last part"
            )
            self.note(f"{full} of {rows} {part} prompts fill {window} (max_length): {consequence}")
        if cut:
            self.note(
                f"{cut} {part} targets are cut to fit {window} (max_length): {lost:,} of their tokens are lost"
            )
        for k, size in enumerate(sizes):
            if training and not size:
                raise UserError(
                    f"all prompts of client number {k + 1} fill {window}: a larger max_length is needed"
                )
