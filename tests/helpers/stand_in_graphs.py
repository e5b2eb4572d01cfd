"""CUDA graphs without CUDA, so that what is around them is tested everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pf2lora.core.method import Loss, State, StepStats, over_tensors
from pf2lora.engines.stepper import GraphStepper, PlainStepper, Stepper
from pf2lora.methods import METHODS


def stepper_of(F: Loss, graphs: bool) -> Stepper:
    """Recorded or plain, whatever the device."""
    return GraphStepper(F) if graphs else PlainStepper(F)


class StandInGraph:
    """A CUDA graph without CUDA: it remembers the method's step that was recorded, and a replay computes it again from
    the same places into the same places, as a graph does."""

    recording: StandInGraph | None = None
    replays = 0

    def pool(self) -> None:
        return None

    def hold(self, step: Any, state: State, out: tuple[State, StepStats]) -> None:
        self.step, self.state, self.out = step, state, out
        self.before = over_tensors(torch.clone, state)

    def close(self) -> None:
        """Nothing is computed while a graph is recorded: what was written meanwhile was not."""
        over_tensors(lambda place, old: place.copy_(old), self.state, self.before)

    def replay(self) -> None:
        StandInGraph.replays += 1
        state, report = self.step()
        over_tensors(lambda place, new: place.copy_(new), self.state, state)
        self.out[1].loss.copy_(report.loss)
        if report.second_order is not None:
            assert self.out[1].second_order is not None
            self.out[1].second_order.copy_(report.second_order)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording and replaying on the CPU, by what stands in for torch's."""

    @contextmanager
    def record(graph: StandInGraph, pool: None) -> Iterator[None]:
        StandInGraph.recording = graph
        yield
        StandInGraph.recording = None
        graph.close()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for kind in {METHODS[name] for name in ("pf2lora", "homlora", "per-fedavg")}:
        original = kind.step

        def step(
            self: Any, F: Any, s: State, *batches: Any, original: Any = original
        ) -> tuple[State, StepStats]:
            out: tuple[State, StepStats] = original(self, F, s, *batches)
            if StandInGraph.recording is not None:
                StandInGraph.recording.hold(lambda: original(self, F, s, *batches), s, out)
            return out

        monkeypatch.setattr(kind, "step", step)
