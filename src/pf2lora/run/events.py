"""What is told of a run while it goes on: small events, for a screen, a log, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pf2lora.run.result import Result, RoundRecord
from pf2lora.tasks.settings import Metric


@dataclass(frozen=True)
class Event:
    """Something that happened; `name` is what a log calls it."""

    name: ClassVar[str]


@dataclass(frozen=True)
class RunStarted(Event):
    """All is loaded and training begins. `work` says of each method how many rows pass through the model, so that
    methods can be weighed against each other; a gradient counts for three."""

    name: ClassVar[str] = "run_started"
    methods: Mapping[str, str]  # the labels by name
    clients: Sequence[str]
    rounds: int
    seeds: int
    base_model: str
    device: str
    metrics: Mapping[str, Metric]  # the headline first
    work: Mapping[str, float]


@dataclass(frozen=True)
class MethodStarted(Event):
    """A method begins with some of its seeds, which share their passes; `seeds_before` of them are done."""

    name: ClassVar[str] = "method_started"
    method: str
    seeds: Sequence[int]
    seeds_before: int = 0


@dataclass(frozen=True)
class Progress(Event):
    """The method went on, by a step or by rows that were answered. `done` is the share of these seeds' work, `round`
    the one it works on, `steps` the clients' steps so far. Before any method, `method` is empty: the untrained model
    is measured."""

    name: ClassVar[str] = "progress"
    method: str
    round: int
    done: float
    steps: int
    evaluating: bool = False


@dataclass(frozen=True)
class RoundEnded(Event):
    """A round is over; the record is what metrics.jsonl has, with scores where it was evaluated."""

    name: ClassVar[str] = "round_ended"
    method: str
    seed: int
    record: RoundRecord


@dataclass(frozen=True)
class MethodEnded(Event):
    """A method is through with all its seeds, or has failed."""

    name: ClassVar[str] = "method_ended"
    method: str
    failed: str | None = None


@dataclass(frozen=True)
class Note(Event):
    """What a user should know, in a line."""

    name: ClassVar[str] = "note"
    line: str


@dataclass(frozen=True)
class RunEnded(Event):
    """All methods are through."""

    name: ClassVar[str] = "run_ended"
    result: Result


Listener = Callable[[Event], None]


def everybody(*listeners: Listener) -> Listener:
    """One that tells all of them, in their order."""

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell
