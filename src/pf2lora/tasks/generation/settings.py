"""Generation of text: its settings, and how it reads rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pf2lora.data.files import Record
from pf2lora.errors import UserError, unknown
from pf2lora.settings import require_not_negative, require_positive, setting
from pf2lora.tasks.generation import e2e, webnlg
from pf2lora.tasks.generation.prompts import PromptRow, choose_columns, prompt_column, rows_of
from pf2lora.tasks.settings import Dataset, TaskSettings

if TYPE_CHECKING:
    from pf2lora.tasks.generation.task import Generation

SCORERS = ("e2e", "webnlg")


@dataclass(frozen=True)
class GenerationSettings(TaskSettings[PromptRow]):
    """A prompt, and the text that should follow it. The defaults of decoding are the LoRA paper's for WebNLG; its
    length penalty for E2E is 0.9. As in LoRA and unlike transformers' own option, the prompt may be repeated."""

    max_length: int = setting(512, "longest input in tokens: prompt, separator, target and end of text")
    beams: int = setting(10, "beam width; 1 is greedy")
    length_penalty: float = setting(0.8, "above 0 favours long texts, below 0 short ones")
    no_repeat_ngram: int = setting(4, "so many tokens of a text are never repeated (0: allowed)")
    max_new_tokens: int = setting(64, "longest generated text in tokens (0: none, only its loss is measured)")
    separator: str | None = setting(
        None, "text between prompt and target (default: the beginning-of-text token)"
    )
    scores: str | None = setting(None, "scores of generated text: e2e or webnlg (default: the data set's)")
    prompt: str | None = setting(None, "column of the prompt (guessed)", column=True)
    target: str | None = setting(None, "column of the target (guessed)", column=True)

    name: ClassVar[str] = "generation"
    datasets: ClassVar[Mapping[str, Dataset[Any]]] = e2e.DATASETS | webnlg.DATASETS

    def __post_init__(self) -> None:
        require_positive(self, "max_length", "beams")
        require_not_negative(self, "max_new_tokens")
        if self.no_repeat_ngram < 0:
            raise UserError(f"no_repeat_ngram is {self.no_repeat_ngram}; it must be at least 0")
        if self.scores is not None and self.scores not in SCORERS:
            raise unknown("kind of scores", self.scores, SCORERS)

    def rows(
        self,
        records: Sequence[Record],
        like: Sequence[Record] | None = None,
        notes: list[str] | None = None,
    ) -> list[PromptRow]:
        return rows_of(records, choose_columns(like or records, self.prompt, self.target))

    def columns(self, records: Sequence[Record]) -> dict[str, str]:
        found = choose_columns(records, self.prompt, self.target)
        return {"prompt": found.prompt, "target": found.target}

    def questions(
        self, records: Sequence[Record], labels: Sequence[str], traits: Sequence[str] = ()
    ) -> list[PromptRow]:
        column = prompt_column(records, self.prompt)
        return [PromptRow(record.text(column), ()) for record in records]

    def typed(self, line: str, traits: Sequence[str] = ()) -> dict[str, Any]:
        return {self.prompt or "prompt": line}

    def build(self, model: str, labels: Sequence[str], metric: str | None = None) -> Generation:
        from pf2lora.adapters.base_model import load_tokenizer
        from pf2lora.tasks.generation.task import Generation

        return Generation(load_tokenizer(model), self, scores=self.scores or metric or "e2e")

    def to_record(self, row: PromptRow) -> dict[str, Any]:
        return {"prompt": row.prompt, "target": list(row.targets), "group": row.group}

    def asked(self, row: PromptRow) -> tuple[str, ...]:
        return (row.prompt,)

    def partition_key(self, row: PromptRow) -> str:
        return row.group
