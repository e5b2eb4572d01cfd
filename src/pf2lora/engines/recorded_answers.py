"""A pass of answers, recorded as a CUDA graph when its shape comes for the second time, and replayed from then on.

The same rows are asked round after round. A small model has done with them before their kernels are launched one by
one; the numbers of a replay are those of the plain pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.failures import ran_out
from pf2lora.engines.batches import Batch
from pf2lora.engines.stepper import copy_batch, no_mask_while_recording, obstacle, own_copy, shape_of

logger = logging.getLogger("pf2lora")
Answers = tuple[Tensor, ...]


class Recording(NamedTuple):
    """A recorded pass: it reads models and rows from fixed places, and writes its answers to one."""

    graph: torch.cuda.CUDAGraph
    models: tuple[Tensor, Tensor]
    batch: Batch
    answers: Answers

    def play(self, models: tuple[Tensor, Tensor], batch: Batch) -> Answers:
        for place, new in zip(self.models, models):
            place.copy_(new)
        copy_batch(self.batch, batch)
        self.graph.replay()
        return tuple(t.clone() for t in self.answers)


@dataclass(eq=False)
class RecordedAnswers:
    """What a trial's model answers; whoever asks the same of it says the same `question`. Where recording fails, or
    its memory is asked for, passes are plain from then on."""

    recordings: dict[Any, Recording] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)
    places: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of models, by their shapes
    plain: bool = False

    def __call__(
        self,
        question: str,
        function: Callable[[Tensor, Tensor, Batch], Answers],
        x: Tensor,
        y: Tensor,
        batch: Batch,
    ) -> Answers:
        key = question, x.shape, y.shape, shape_of(batch)
        if self.plain or key not in self.seen:
            self.seen.add(key)
            return function(x, y, batch)
        if key not in self.recordings:
            try:
                self.recordings[key] = self.record(function, x, y, batch)
            except RuntimeError as error:
                self.forget()
                if ran_out(error):
                    raise
                logger.warning("answers are computed without a CUDA graph: %s", obstacle(error))
                return function(x, y, batch)
        return self.recordings[key].play((x, y), batch)

    def record(
        self, function: Callable[[Tensor, Tensor, Batch], Answers], x: Tensor, y: Tensor, batch: Batch
    ) -> Recording:
        models = self.places.setdefault((x.shape, y.shape), (x.clone(), y.clone()))
        held, graph = own_copy(batch), torch.cuda.CUDAGraph()
        # One pool for all: only one plays at a time, and its answers are copied.
        pool = next(iter(self.recordings.values())).graph.pool() if self.recordings else None
        with no_mask_while_recording(), torch.cuda.graph(graph, pool=pool):
            answers = function(*models, held)
        return Recording(graph, models, held, answers)

    def forget(self) -> bool:
        """Give the memory back; whether there was any."""
        held = bool(self.recordings)
        self.recordings.clear()
        self.places.clear()
        self.plain = True
        return held
