"""Texts by language models: prompts as the run was trained on them, and the worker that writes behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError
from torch import Tensor

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.serve.batch import Row, RunningBatch
from pf2lora.serve.errors import bad_request
from pf2lora.serve.text import GrowingText
from pf2lora.serve.worker import Worker
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.task import Generation

MOST_POSITIONS = (
    4096  # of prompt and answer, where the model could do more: what each row remembers takes memory
)


@dataclass(frozen=True)
class Piece:
    """More of a text; with its last piece the reason why it ends."""

    index: int
    text: str
    tokens: int  # so far
    finish: Literal["stop", "length"] | None = None


@dataclass(eq=False)
class TextJob(Row):
    """A text to be written: the `index`-th of its request."""

    tell: Callable[[Any], None] = field(kw_only=True)
    text: GrowingText = field(kw_only=True)
    most: int = field(kw_only=True)
    index: int = 0
    cancelled: bool = False

    def advance(self, ends: frozenset[int]) -> bool:
        """Take the token that was chosen last, and tell what it adds; whether the text has ended."""
        if self.last in ends:
            self.text.tokens.append(self.last)  # counted, and not part of the text
            self.finish("stop", "")
            return True
        more = self.text.add(self.last)
        if self.text.stopped or len(self.text.tokens) >= self.most:
            self.finish("stop" if self.text.stopped else "length", more)
            return True
        if more:
            self.tell(Piece(self.index, more, len(self.text.tokens)))
        return False

    def finish(self, reason: Literal["stop", "length"], more: str) -> None:
        rest = self.text.end()
        reason = "stop" if self.text.stopped else reason  # a stop string may lie in what was held back
        self.tell(Piece(self.index, more + rest, len(self.text.tokens), reason))


class Writer(Worker[TextJob]):
    """Writes the texts of at most `size` jobs at a time, one token of each in a pass."""

    def __init__(
        self,
        model: TwoLevelModel,
        adapters: Mapping[str, tuple[Tensor, Tensor]],
        task: Generation,
        size: int,
        most_waiting: int,
    ) -> None:
        super().__init__(most_waiting)
        self.size = size
        self.ends = end_tokens(model, task)
        self.batch = RunningBatch(model, adapters.__getitem__, task.pad)

    def turn(self) -> None:
        self._go_on([job for job in self.running if not job.cancelled])
        newcomers = self.take(self.size - len(self.running))
        if newcomers:
            self.batch.admit(newcomers)
            self._advance(newcomers)
        if self.running:
            self.batch.step()
            self._advance(self.running)

    def _advance(self, jobs: Sequence[TextJob]) -> None:
        ended = [job for job in jobs if job.advance(self.ends)]
        self._go_on([job for job in self.running if job not in ended])

    def _go_on(self, jobs: list[TextJob]) -> None:
        self.running = jobs
        self.batch.keep(jobs)

    def reset(self) -> None:
        self.batch.clear()


class Prompts:
    """Requests as tokens. A completion's prompt is the run's own: with its separator, as in training. A chat goes
    through the tokenizer's template; where it has none, its messages are such a prompt."""

    def __init__(self, task: Generation, longest: int) -> None:
        self.task, self.longest = task, longest
        self.tokenizer = task.tokenizer
        self.lock = threading.Lock()  # requests are made into tokens beside the event loop, one at a time
        self.has_template = bool(getattr(task.tokenizer, "chat_template", None))

    def of_texts(self, texts: Sequence[str]) -> list[list[int]]:
        if any(not text.strip() for text in texts):
            raise bad_request("an empty prompt cannot be continued", "prompt")
        with self.lock:
            return self.task.encoder.prompts([PromptRow(text, ()) for text in texts])

    def of_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if not self.has_template:
            plain = [message["content"] for message in messages]
            if len(messages) > 1:
                plain = [f"{message['role']}: {message['content']}" for message in messages]
            return self.of_texts(["\n".join(plain)])[0]
        with self.lock:
            return self._templated(messages)

    def _templated(self, messages: Sequence[dict[str, str]]) -> list[int]:
        try:
            found: Any = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:  # some templates take no system message, or want turns to alternate
            raise bad_request(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from None
        return list(found["input_ids"])

    def room(self, prompt: list[int], asked: int | None, param: str) -> int:
        """How many tokens may follow the prompt: as many as asked for, or else as the run writes."""
        left = self.longest - len(prompt)
        if left < 1 or (asked or 0) > left:
            raise bad_request(
                f"the prompt has {len(prompt)} tokens and {asked or 1} are to follow, but prompt and answer together "
                f"may have {self.longest}",
                param,
                "context_length_exceeded",
            )
        return asked or min(left, self.task.settings.max_new_tokens or left)

    def growing(self, stops: Sequence[str], *, chat: bool) -> GrowingText:
        """In training a blank comes before each target (tasks/generation/encoding.py): it is no part of the answer."""

        def decode(tokens: list[int]) -> str:
            return str(
                self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )

        return GrowingText(decode, stops, blank_before=not (chat and self.has_template))


def positions(model: TwoLevelModel) -> int:
    """How many tokens prompt and answer may have together, unless somebody says otherwise."""
    known = getattr(model.model.config, "max_position_embeddings", None)
    return min(known or MOST_POSITIONS, MOST_POSITIONS)


def end_tokens(model: TwoLevelModel, task: Generation) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, with which targets end in training, and the model's own."""
    own = getattr(model.model.generation_config, "eos_token_id", None)
    several = own if isinstance(own, list) else [own]
    return frozenset(token for token in (task.tokenizer.eos_token_id, *several) if token is not None)
