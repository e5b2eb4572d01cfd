"""How many clients share a pass, and what is done when the device has no memory for them: half as many, and on."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from pf2lora.errors import UserError

logger = logging.getLogger("pf2lora")
T = TypeVar("T")


@dataclass
class Room:
    """`clients` fit into a pass. What a pass does depends on nobody else's presence, so that fewer of them change no
    number but by rounding."""

    clients: int

    def passes(
        self, clients: Sequence[int], run: Callable[[list[int]], T], undo: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[list[int], T]]:
        """`run` for all clients, as many at a time as there is room for. Where memory ends, what was done of the pass
        is undone, and it is done again with half of the clients."""
        waiting = list(clients)
        while waiting:
            together = waiting[: self.clients]
            done = attempt(run, together)
            if done is None:
                undo()
                self.halve(len(together))
                continue
            yield together, done[0]
            waiting = waiting[len(together) :]

    def halve(self, tried: int) -> None:
        """There was no memory for so many."""
        free_memory()
        if tried == 1:
            raise UserError(
                "the device's memory is too small for a pass of one client: try --checkpointing on, --micro-batch 1, "
                "--quantization nf4, or a smaller --max-length"
            )
        self.clients = tried // 2
        logger.warning(
            "out of memory with %d clients in a pass: from here on %d at a time, with the same numbers",
            *(tried, self.clients),
        )


def attempt(run: Callable[[list[int]], T], clients: list[int]) -> tuple[T] | None:
    """What `run` returns, or None where it runs out of memory. The error is gone then, and with it what it held."""
    try:
        return (run(clients),)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        return None


def ran_out(error: BaseException | None) -> bool:
    """Whether an error is one of memory, or came while one was dealt with: as when a recording is broken off."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def free_memory() -> None:
    """Give back what nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
