"""Clients' states between the host, where they wait, and the device that trains them: the next ones' travel while these
are trained, and these go home while the next ones are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pf2lora.core.method import State, moved, over_tensors, put, rows_of, take, tensors_of
from pf2lora.engines.stepper import side_stream


class SetOut(NamedTuple):
    """Clients whose states are on their way to the device; `there` is when they have arrived."""

    clients: list[int]
    states: State
    there: Any  # a CUDA event


@contextmanager
def travelling(state: State, device: torch.device) -> Iterator[Travel]:
    """A round's travels, after which everybody is home."""
    travel = Travel(state, device)
    try:
        yield travel
    finally:
        travel.settle()


@dataclass
class Travel:
    """A round's travels. `state` has all learners' states, at home; where that is the device that trains them, or there
    is no CUDA device, nothing travels beside the training."""

    state: State
    device: torch.device
    ahead: SetOut | None = None
    back: Any = None  # a CUDA event: when all who left the device are home

    @property
    def beside(self) -> bool:
        """Whether states travel while others are trained: to the device whose streams are at hand."""
        if self.device.type != "cuda" or self.state.x.device.type != "cpu":
            return False
        return self.device.index in (None, torch.cuda.current_device())

    def fetch(self, clients: list[int], following: Sequence[int] = ()) -> State:
        """These clients' states on the device; those who train after them set out."""
        part = self.arrived(clients) or moved(take(self.state, clients), self.device)
        if self.beside and following:
            aside = side_stream()
            # Rows that were gathered are not where the device reads by itself, as those in their place are.
            leaving = over_tensors(
                lambda t: t if t.is_pinned() else t.pin_memory(), take(self.state, following)
            )
            with torch.cuda.stream(aside):
                states = moved(leaving, self.device)
            self.ahead = SetOut(list(following), states, aside.record_event())
        return part

    def arrived(self, clients: list[int]) -> State | None:
        """The states of clients who were sent ahead; None where others were."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead.clients != clients:
            return None
        now = torch.cuda.current_stream()
        now.wait_event(ahead.there)
        for tensor in tensors_of(ahead.states):
            tensor.record_stream(now)  # whose memory is the other stream's until this one is done with it
        return ahead.states

    def bring_back(self, clients: Sequence[int], part: State) -> None:
        """Write clients' states over their old ones, at home. Nobody may look at those before `settle`."""
        rows = rows_of(clients, self.state.x.device)
        if not self.beside or not isinstance(rows, slice):
            put(self.state, clients, part)
            return
        aside = side_stream()
        aside.wait_stream(torch.cuda.current_stream())  # until they are computed

        def write(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            new.record_stream(aside)
            return old[rows].copy_(new, non_blocking=True)

        with torch.cuda.stream(aside):
            over_tensors(write, self.state, part)
        self.back = aside.record_event()

    def drop(self) -> None:
        """Forget who was sent ahead: their memory is needed."""
        self.ahead = None

    def settle(self) -> None:
        """Wait until all are home."""
        self.drop()
        if self.back is not None:
            self.back.synchronize()
