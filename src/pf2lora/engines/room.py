"""How much shares a pass, and what is done when the device has no memory for it: half as much, and on."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from pf2lora.core.failures import ran_out
from pf2lora.errors import UserError

logger = logging.getLogger("pf2lora")
T = TypeVar("T")


class Holder(Protocol):
    """Who holds memory for later, which can be given back."""

    def forget(self) -> bool:
        """Give it back; whether there was any."""
        ...


class Recorder(Holder, Protocol):
    """How a pass of answers is run that will come again; whoever asks the same says the same `question`."""

    def __call__(
        self, question: str, function: Callable[..., tuple[Tensor, ...]], x: Tensor, y: Tensor, batch: Any
    ) -> tuple[Tensor, ...]: ...


class NoRoom(UserError):
    """Not even one row of one client fits."""


@dataclass
class Room:
    """How many `clients` share a pass of one kind, and how many `rows` of each are computed at once; None: all there
    are. What a pass does depends on nobody else's presence, so that less of it changes no number but by rounding.
    Where shorter rows share a pass in larger numbers, `rows` counts the longest ones; there are at most `short` of any.

    `holders` have memory that a pass may need more than they do: the recorded steps of the run. The `recorder` is
    there where memory is plenty and passes are worth it.
    """

    clients: int | None = None
    rows: int | None = None
    kind: str = "a pass"
    holders: WeakSet[Holder] = field(default_factory=WeakSet, repr=False)
    short: int | None = None
    recorder: Recorder | None = None

    def passes(
        self, clients: Sequence[int], run: Callable[[list[int]], T], undo: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[list[int], T]]:
        """`run` for all clients, as many at a time as there is room for. Where memory ends, what was done of the pass
        is undone, and it is done again with half of the clients, or of a single one's rows."""
        waiting = list(clients)
        while waiting:
            together = waiting[: self.clients]
            done = attempt(run, together)
            if done is None:
                undo()
                self.halve(len(together), self.rows or 1)
                continue
            yield together, done[0]
            del done  # with what the pass left on the device
            waiting = waiting[len(together) :]

    def halve(self, clients: int, rows: int, longest: int | None = None) -> None:
        """There was no memory for so many clients with so many rows of each, which have the tokens of so many of the
        `longest` ones."""
        if not self.give_back():
            free_memory()  # of what was tried
        if clients > 1:
            self.clients, tried, now = clients // 2, f"{clients} clients", clients // 2
        elif rows > 1:
            tried, now = f"{rows} rows of a client", rows // 2
            if longest is None or longest > 1:
                self.rows = (longest or rows) // 2
            else:
                self.short = now
        else:
            raise NoRoom(
                f"the device's memory is too small for {self.kind} of one client: try --checkpointing on, "
                f"--micro-batch 1, --quantization nf4, or a smaller --max-length"
            )
        logger.warning(
            "out of memory with %s in %s: from here on %d at a time, with the same numbers",
            tried,
            self.kind,
            now,
        )

    def give_back(self) -> bool:
        """Let those who hold memory give it back; whether there was any."""
        gave = [holder.forget() for holder in list(self.holders)]
        if any(gave):
            free_memory()
        return any(gave)


@dataclass
class Rooms:
    """A run's room on one device, by what is done in a pass: each kind takes memory of its own, and they share those
    who hold some."""

    training: Room = field(default_factory=Room)
    answering: Room = field(default_factory=Room)
    writing: Room = field(default_factory=Room)

    @classmethod
    def of(cls, clients: int | None = None, rows: int | None = None) -> Rooms:
        """Passes of at most so many clients, of whom so many rows are trained on at once."""
        holders: WeakSet[Holder] = WeakSet()
        return cls(
            Room(clients, rows, holders=holders),
            Room(clients, None, "an answering pass", holders),
            Room(clients, None, "a writing pass", holders),
        )


def attempt(run: Callable[..., T], *args: object) -> tuple[T] | None:
    """What `run` returns, or None where it runs out of memory. The error is gone then, and with it what it held."""
    try:
        return (run(*args),)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return None


def free_memory() -> None:
    """Give back what nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
