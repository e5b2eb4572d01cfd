"""How a local step is run: as it is written, or recorded once as a CUDA graph and replayed.

A recorded step has no Python and no launch overhead in it; its numbers are those of the plain step.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from unittest.mock import patch

import torch

from pf2lora.core.failures import errors_of, ran_out
from pf2lora.core.method import Loss, Method, State, StepStats, over_tensors, tensors_of
from pf2lora.engines.batches import Batch
from pf2lora.engines.rates import StepRates
from pf2lora.engines.room import attempt, free_memory

logger = logging.getLogger("pf2lora")

NO_RATES: StepRates = MappingProxyType({})
WARM_UP = 3  # steps before the first recording: libraries set up their workspaces in the first ones
WARM_UP_AGAIN = 1  # before further ones: a new shape may need kernels that are not loaded yet


class Stepper(Protocol):
    """One local step of every client. The state it returns is valid until the next call."""

    def __call__(
        self, method: Method, state: State, batches: Sequence[Any], rates: StepRates = NO_RATES
    ) -> tuple[State, StepStats]: ...

    def keep(self, state: State) -> State:
        """The state as one's own, which no later step writes over."""
        ...

    def forget(self) -> bool:
        """Give back the memory that it holds for later steps; whether there was any."""
        ...


@dataclass(frozen=True)
class PlainStepper:
    """The method's own step."""

    F: Loss

    def __call__(
        self, method: Method, state: State, batches: Sequence[Any], rates: StepRates = NO_RATES
    ) -> tuple[State, StepStats]:
        return method.with_rates(rates).step(self.F, state, *batches)

    def keep(self, state: State) -> State:
        return state

    def forget(self) -> bool:
        return False


@dataclass
class Recording:
    """A recorded step of one shape: it reads its batches, rates and state from fixed places, and writes there. The
    state's place is that of all recordings whose states have its shape."""

    graph: torch.cuda.CUDAGraph
    batches: list[Batch]
    state: State
    stats: StepStats
    rates: StepRates

    def play(self, state: State, batches: Sequence[Batch], rates: StepRates) -> tuple[State, StepStats]:
        if state is not self.state:
            over_tensors(lambda place, new: place.copy_(new), self.state, state)
        for place, new in zip(self.batches, batches):
            copy_batch(place, new)
        for name, rate in rates.items():
            self.rates[name].copy_(rate)
        self.graph.replay()
        return self.state, own_stats(self.stats)


@dataclass(eq=False)
class GraphStepper:
    """Replays the step as a CUDA graph, one recording per method and shape of its batches.

    Where recording fails (an operation that waits for the device), it says so once and goes on plainly.
    """

    F: Loss
    recordings: dict[Any, Recording] = field(default_factory=dict)
    places: dict[Any, State] = field(default_factory=dict)  # of the recordings, one for each shape of a state
    plain: bool = False
    gave_way: bool = False  # whether recordings had to, which is said once

    def __call__(
        self, method: Method, state: State, batches: Sequence[Any], rates: StepRates = NO_RATES
    ) -> tuple[State, StepStats]:
        if self.plain:
            return method.with_rates(rates).step(self.F, state, *batches)
        key = method, signature(state, batches), tuple(rates)
        if key not in self.recordings:
            try:
                self.recordings[key] = self.recorded(method, state, batches, rates)
            except RuntimeError as error:
                if ran_out(error):
                    raise
                logger.warning("steps run without a CUDA graph: %s", obstacle(error))
                self.plain = True
                return method.with_rates(rates).step(self.F, state, *batches)
        return self.recordings[key].play(state, batches, rates)

    def keep(self, state: State) -> State:
        return over_tensors(torch.clone, state)

    def forget(self) -> bool:
        held = bool(self.recordings)
        self.recordings.clear()
        self.places.clear()
        return held

    def recorded(self, method: Method, state: State, batches: Sequence[Batch], rates: StepRates) -> Recording:
        """The step, recorded. Where memory ends, the other recordings give theirs back first."""
        if self.recordings:
            if found := attempt(self.record, method, state, batches, rates):
                return found[0]
            self.say_once(len(self.recordings))
            self.recordings.clear()
            free_memory()
        return self.record(method, state, batches, rates)

    def record(
        self, method: Method, state: State, batches: Sequence[Batch], rates: StepRates = NO_RATES
    ) -> Recording:
        """Run the step a few times aside, then record it; the new state is written over the old."""
        own_rates = {name: rate.clone() for name, rate in rates.items()}
        place = self.place(method, state)
        method = method.with_rates(own_rates)
        held = [own_copy(batch) for batch in batches]
        aside = side_stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside), no_mask_while_recording():  # a compiled model is compiled here
            for _ in range(WARM_UP_AGAIN if self.recordings else WARM_UP):
                method.step(self.F, place, *held)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with no_mask_while_recording(), torch.cuda.graph(graph, pool=self.pool()):
            after, stats = method.step(self.F, place, *held)
            over_tensors(lambda old, new: old.copy_(new), place, after)
        return Recording(graph, held, place, stats, own_rates)

    def say_once(self, recordings: int) -> None:
        if not self.gave_way:
            logger.warning(
                "out of memory beside %d recorded steps: they are recorded again when they are needed; fewer "
                "--clients-per-pass would leave room for all",
                recordings,
            )
        self.gave_way = True

    def place(self, method: Method, state: State) -> State:
        """The state, where recordings of its shape read and write it: all of them in one place, since a step begins
        with what the last one wrote, whichever recording that was."""
        key = type(method), tuple((t.shape, t.dtype) for t in tensors_of(state))
        if key not in self.places:
            self.places[key] = over_tensors(torch.clone, state)
        elif state is not self.places[key]:
            over_tensors(lambda place, new: place.copy_(new), self.places[key], state)
        return self.places[key]

    def pool(self) -> Any:
        """All recordings share one pool of memory: only one plays at a time."""
        return next(iter(self.recordings.values())).graph.pool() if self.recordings else None


_streams: dict[Any, Any] = {}


def side_stream() -> torch.cuda.Stream:
    """The stream that steps are tried on before they are recorded. There is one: each stream that multiplies matrices
    gets a workspace (32 MB on an H200) that torch keeps for good."""
    if torch.cuda.Stream not in _streams:
        _streams[torch.cuda.Stream] = torch.cuda.Stream()
    stream: torch.cuda.Stream = _streams[torch.cuda.Stream]
    return stream


def obstacle(error: RuntimeError) -> str:
    """What stood in the way of a recording: the operation's own line of code, and what torch says of it. torch ends a
    recording after an error, too, which fails in turn: the operation's is the first error."""
    *_, first = errors_of(error)
    last = traceback.extract_tb(first.__traceback__)[-1]
    says = str(first).splitlines() or [type(first).__name__]
    return f"`{last.line}` ({Path(last.filename).name}, line {last.lineno}): {says[0]}"


@contextmanager
def no_mask_while_recording() -> Iterator[None]:
    """Some versions of transformers build a mask while a stream is recorded even where they were given none.

    Ours are ready-made (`architectures.needed_mask`); a mask that is there must still not be looked into.
    """
    with patch("transformers.masking_utils.is_tracing", lambda tensor=None: tensor is not None):
        yield


def own_stats(stats: StepStats) -> StepStats:
    """A copy that the next replay does not write over."""
    share = stats.second_order
    return StepStats(stats.loss.clone(), None if share is None else share.clone())


def own_copy(batch: Batch) -> Batch:
    tensors = {name: tensor.clone() for name, tensor in batch.tensors.items()}
    return replace(batch, tensors=tensors, key=None if batch.key is None else batch.key.clone())


def copy_batch(place: Batch, new: Batch) -> None:
    for name, tensor in new.tensors.items():
        place.tensors[name].copy_(tensor, non_blocking=True)
    if place.key is not None and new.key is not None:
        place.key.copy_(new.key, non_blocking=True)


def signature(state: State, batches: Sequence[Batch]) -> Any:
    """What a recording depends on: the number of clients and the shapes of the batches."""
    return state.x.shape, tuple(map(shape_of, batches))


def shape_of(batch: Batch) -> Any:
    """What a recording depends on of a batch."""
    shapes = ((name, t.shape) for name, t in sorted(batch.tensors.items()))
    return batch.full, batch.targets, batch.row_targets, batch.key is None, *shapes


def make_stepper(F: Loss, device: torch.device | str, *, graphs: bool = True) -> Stepper:
    """Recorded on a CUDA device, plain elsewhere and where `graphs` is off."""
    return GraphStepper(F) if graphs and torch.device(device).type == "cuda" else PlainStepper(F)
