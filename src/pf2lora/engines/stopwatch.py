"""How long a part of a pass takes, on a device that works on behind its caller's back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Stopwatch:
    """The seconds in which it was running. It waits for the device at both ends, so it is not for what is done in every
    step."""

    device: torch.device
    seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wait_for(self.device)
        started = time.perf_counter()
        try:
            yield
            wait_for(self.device)
        finally:
            self.seconds += time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    """Until it has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
