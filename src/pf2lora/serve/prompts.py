"""Requests as a language model reads them: as the rows that the run was trained on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.errors import UserError, one_line
from pf2lora.serve.errors import bad_request
from pf2lora.serve.text import GrowingText
from pf2lora.tasks.generation.conversations import ASSISTANT, Conversation, Message
from pf2lora.tasks.generation.decoding import end_tokens
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import TextRow
from pf2lora.tasks.generation.task import Generation

MOST_POSITIONS = (
    4096  # of prompt and answer, where the model could do more: what each row remembers takes memory
)


class Prompts:
    """Texts and chats as tokens. In a run of conversations, both go through its chat template, a text as what a user
    says; in a run of prompts, both are a prompt with the run's separator."""

    def __init__(self, task: Generation, model: TwoLevelModel, longest: int | None = None) -> None:
        self.task, self.tokenizer = task, task.tokenizer
        self.longest = positions(model, longest)
        self.ends = frozenset(end_tokens(task.encoder.stops, model.model))
        self.lock = threading.Lock()  # requests are made into tokens beside the event loop, one at a time

    @property
    def of_conversations(self) -> bool:
        return self.task.encoder.writes_turns

    def of_texts(self, texts: Sequence[str]) -> list[list[int]]:
        if any(not text.strip() for text in texts):
            raise bad_request("an empty prompt cannot be continued", "prompt")
        rows: list[TextRow] = [PromptRow(text, ()) for text in texts]
        if self.of_conversations:
            rows = [Conversation((Message("user", text),)) for text in texts]
        return self._tokens(rows, "prompt")

    def of_chat(self, messages: Sequence[Message]) -> list[int]:
        asked = Conversation(tuple(messages))
        if messages[-1].role == ASSISTANT or not messages[-1].content.strip():
            raise bad_request("the last message must be one that the assistant can answer", "messages")
        row: TextRow = asked if self.of_conversations else PromptRow(asked.prompt, ())
        return self._tokens([row], "messages")[0]

    def _tokens(self, rows: Sequence[TextRow], param: str) -> list[list[int]]:
        try:
            with self.lock:
                return self.task.encoder.prompts(rows)
        except UserError as error:  # some templates want turns to alternate
            raise bad_request(one_line(error), param) from None

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

    def growing(self, stops: Sequence[str]) -> GrowingText:
        """An empty text. The blank with which targets begin in training is no part of it."""

        def decode(tokens: list[int]) -> str:
            return str(
                self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )

        return GrowingText(decode, stops, blank_before=True)


def positions(model: TwoLevelModel, asked: int | None) -> int:
    """How many tokens prompt and answer may have together: as many as somebody asked for, where the model can."""
    known = getattr(model.model.config, "max_position_embeddings", None)
    if asked and known and asked > known:
        raise UserError(f"--max-length is {asked}, but the model takes {known} tokens")
    return asked or min(known or MOST_POSITIONS, MOST_POSITIONS)
