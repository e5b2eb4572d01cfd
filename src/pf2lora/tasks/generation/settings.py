"""Generation of text: its settings, and how it reads rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pf2lora.core.rates import TEXT_RATE
from pf2lora.data.client import Client
from pf2lora.data.files import Record
from pf2lora.errors import UnknownLabel, UserError, unknown
from pf2lora.settings import require_not_negative, require_positive, setting
from pf2lora.tasks.generation import e2e, webnlg
from pf2lora.tasks.generation.conversations import Conversation
from pf2lora.tasks.generation.prompts import (
    Columns,
    PromptRow,
    choose_columns,
    question_columns,
    rows_of,
)
from pf2lora.tasks.generation.turns import MessageColumn, as_turn
from pf2lora.tasks.settings import Dataset, TaskSettings

if TYPE_CHECKING:
    from pf2lora.tasks.generation.task import Generation

SCORERS = ("e2e", "webnlg", "answers")
CHAT, PROMPTS = "chat", "prompts"
"""The label of a run whose rows are conversations, by which a saved run knows it; a federation names either."""

TextRow = PromptRow | Conversation


@dataclass(frozen=True)
class GenerationSettings(TaskSettings[TextRow]):
    """A prompt, and the text that should follow it; or a conversation, of which the assistant's turns are learned. The
    defaults of decoding are the LoRA paper's for WebNLG; its length penalty for E2E is 0.9. As in LoRA and unlike
    transformers' own option, the prompt may be repeated."""

    max_length: int = setting(512, "longest input in tokens: prompt, separator, target and end of text")
    beams: int | None = setting(None, "beam width; 1 is greedy (default: 10; of conversations 1)")
    length_penalty: float = setting(0.8, "above 0 favours long texts, below 0 short ones")
    no_repeat_ngram: int | None = setting(
        None, "so many tokens of a text are never repeated; 0: allowed (default: 4; of conversations 0)"
    )
    temperature: float = setting(
        0.0, "above 0: tokens are drawn, the more freely the higher; beams are not used"
    )
    top_p: float = setting(
        1.0, "with --temperature: drawn from the likeliest tokens that have this share together"
    )
    sampling_seed: int = setting(0, "with --temperature: another seed draws other texts")
    max_new_tokens: int = setting(64, "longest generated text in tokens (0: none, only its loss is measured)")
    separator: str | None = setting(
        None, "text between prompt and target (default: the beginning-of-text token)"
    )
    packing: bool = setting(
        False, "several short examples in one row of max_length tokens, each seeing itself alone"
    )
    scores: str | None = setting(
        None,
        "scores of generated text: e2e, webnlg or answers (default: the data set's; of conversations answers)",
    )
    prompt: str | None = setting(None, "column of the prompt (guessed)", column=True)
    target: str | None = setting(None, "column of the target (guessed)", column=True)
    messages: str | None = setting(None, "column of the conversation (guessed)", column=True)
    chat: bool | None = setting(
        None, "rows go through the tokenizer's chat template (default: by their columns)"
    )

    name: ClassVar[str] = "generation"
    rate: ClassVar[float] = TEXT_RATE
    datasets: ClassVar[Mapping[str, Dataset[Any]]] = e2e.DATASETS | webnlg.DATASETS

    def __post_init__(self) -> None:
        require_positive(self, "max_length", "beams")
        require_not_negative(self, "max_new_tokens", "temperature", "sampling_seed")
        if self.no_repeat_ngram is not None and self.no_repeat_ngram < 0:
            raise UserError(f"no_repeat_ngram is {self.no_repeat_ngram}; it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.temperature and (self.beams or 1) > 1:
            raise UserError(
                f"temperature {self.temperature} draws a text, and beams {self.beams} search for one: give one"
            )
        if self.scores is not None and self.scores not in SCORERS:
            raise unknown("kind of scores", self.scores, SCORERS)

    def rows(
        self,
        records: Sequence[Record],
        like: Sequence[Record] | None = None,
        notes: list[str] | None = None,
    ) -> list[TextRow]:
        chosen = self.chosen(like or records)
        if isinstance(chosen, MessageColumn) or chosen.chat:
            chosen = self.chosen(records)  # each client may have its own way to write conversations down
        return rows_of(records, chosen, notes)

    def chosen(self, records: Sequence[Record]) -> Columns | MessageColumn:
        return choose_columns(records, self.prompt, self.target, self.messages, self.chat)

    def columns(self, records: Sequence[Record]) -> dict[str, str]:
        found = self.chosen(records)
        if isinstance(found, MessageColumn):
            return {"messages": found.messages}
        assert found.target is not None
        return {"prompt": found.prompt, "target": found.target}

    def questions(
        self, records: Sequence[Record], labels: Sequence[str], traits: Sequence[str] = ()
    ) -> list[TextRow]:
        columns = question_columns(records, self.prompt, self.messages, CHAT in labels)
        return [columns.question(record) for record in records]

    def typed(self, line: str, traits: Sequence[str] = ()) -> dict[str, Any]:
        return {self.prompt or "prompt": line}

    def labels(self, clients: Sequence[Client[TextRow]]) -> list[str]:
        rows = (row for client in clients for row in [*client.train, *client.test])
        return [CHAT] if any(isinstance(row, Conversation) for row in rows) else []

    def agreed(self, labels: Sequence[str]) -> list[str]:
        """Whether rows are conversations; they are prompts where nobody says anything."""
        if not set(labels) <= {CHAT, PROMPTS} or len(labels) > 1:
            raise UserError(
                f"generation has no labels but {CHAT!r}, where rows are conversations: --labels {CHAT}"
            )
        return list(labels) or [PROMPTS]

    def check(
        self,
        clients: Sequence[Client[TextRow]],
        labels: Sequence[str],
        test_records: Mapping[str, Sequence[Record]] | None = None,
    ) -> None:
        if CHAT in labels:
            return
        for client in clients:
            if self.labels([client]):
                raise UnknownLabel(
                    f"client {client.name!r} has conversations, but the run knows only prompts "
                    f"(in a federation: --labels {CHAT}; to read columns as they stand: --no-chat)"
                )

    def build(self, model: str, labels: Sequence[str], metric: str | None = None) -> Generation:
        from pf2lora.adapters.base_model import load_tokenizer
        from pf2lora.tasks.generation.task import Generation

        return Generation(
            load_tokenizer(model), self, scores=self.scorer(labels, metric), chat=CHAT in labels
        )

    def scorer(self, labels: Sequence[str], metric: str | None) -> str:
        """Which scores written text gets."""
        return self.scores or metric or ("answers" if CHAT in labels else "e2e")

    def metric_names(self, labels: Sequence[str], metric: str | None = None) -> tuple[str, ...]:
        from pf2lora.tasks.generation.task import metrics_of

        return tuple(metrics_of(self, self.scorer(labels, metric)))

    def to_record(self, row: TextRow) -> dict[str, Any]:
        if isinstance(row, Conversation):
            tools = {"tools": list(row.tools)} if row.tools else {}
            return {"messages": [as_turn(message) for message in row.messages], "group": row.group} | tools
        return {"prompt": row.prompt, "target": list(row.targets), "group": row.group}

    def asked(self, row: TextRow) -> tuple[str, ...]:
        return (row.prompt,)

    def partition_key(self, row: TextRow) -> str:
        return row.group
