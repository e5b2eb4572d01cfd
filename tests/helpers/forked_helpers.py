"""Helpers that are forks of this process: they compute with whatever is at hand here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from pf2lora.engines.accumulation import Sums
from pf2lora.engines.helpers import Computing, Helpers, Numbers, serve

PATIENCE = 120  # seconds after which a forgotten helper ends


@dataclass
class Forked:
    """A fork as `subprocess` would have it."""

    pid: int
    code: int | None = None

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


def fork(channel: Connection, file: int, build: Callable[[Any], Computing]) -> Forked:
    child = os.fork()
    if child:
        return Forked(child)
    try:
        signal.alarm(PATIENCE)
        torch.set_num_threads(1)
        serve(channel, file, build)
    finally:
        os._exit(0)


@contextmanager
def helped(
    processes: int, sums: Sums, *tensors: Tensor, build: Callable[[Any], Computing] | None = None
) -> Iterator[Helpers]:
    """The helpers of a process, `processes` with it; they compute `sums` of x and y like `tensors`."""
    make = build or (lambda order: Computing(sums, torch.device("cpu")))
    numbers = Numbers.made(processes - 1, *tensors)
    helpers = Helpers(
        numbers, lambda channel, file: fork(channel, file, make), lambda number: {"number": number}
    )
    try:
        yield helpers
    finally:
        helpers.close()
