"""Texts by language models: the worker that writes them, all that are running one token further in each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.serve.batch import Row, RunningBatch
from pf2lora.serve.errors import ApiError
from pf2lora.serve.prompts import Prompts
from pf2lora.serve.text import GrowingText
from pf2lora.serve.worker import Worker, check_device
from pf2lora.tasks.generation.sampling import BROKEN


@dataclass(frozen=True)
class Piece:
    """More of a text; with its last piece the reason why it ends."""

    index: int
    text: str
    finish: Literal["stop", "length"] | None = None


@dataclass(eq=False)
class TextJob(Row):
    """A text to be written: the `index`-th of its request."""

    tell: Callable[[Any], None] = field(kw_only=True)
    text: GrowingText = field(kw_only=True)
    most: int = field(kw_only=True)
    index: int = 0
    owner: str = ""
    cancelled: bool = False
    ended: bool = False  # by a token of its own, which is counted and no part of the text

    @property
    def written(self) -> int:
        """How many tokens the model has written."""
        return len(self.text.tokens) + self.ended

    def advance(self, ends: frozenset[int]) -> bool:
        """Take the token that was chosen last, and tell what it adds; whether the text has ended."""
        if self.last == BROKEN:  # by its own client's adapter: those beside it write on
            self.tell(
                ApiError(500, f"the model {self.model[:80]!r} computes no numbers: its adapter is broken")
            )
            return True
        if self.last in ends:
            self.ended = True
            self.finish("stop", "")
            return True
        more = self.text.add(self.last)
        if self.text.stopped or len(self.text.tokens) >= self.most:
            self.finish("stop" if self.text.stopped else "length", more)
            return True
        if more:
            self.tell(Piece(self.index, more))
        return False

    def finish(self, reason: Literal["stop", "length"], more: str) -> None:
        rest = self.text.end()
        reason = "stop" if self.text.stopped else reason  # a stop string may lie in what was held back
        self.tell(Piece(self.index, more + rest, reason))


class Writer(Worker[TextJob]):
    """Writes the texts of at most `size` jobs at a time, one token of each in a pass."""

    def __init__(
        self,
        model: TwoLevelModel,
        adapters: Mapping[str, tuple[Tensor, Tensor]],
        prompts: Prompts,
        size: int,
        most_waiting: int,
        most_of_one: int | None = None,
    ) -> None:
        super().__init__(most_waiting, most_of_one)
        self.size = size
        self.ends = prompts.ends
        self.batch = RunningBatch(model, adapters.__getitem__, prompts.task.pad)

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
        check_device(self.batch.device)
