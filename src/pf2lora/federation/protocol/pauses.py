"""Pauses that grow, for what is tried again and again and comes to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping

LONGEST = 3600.0  # seconds


class Pauses:
    """For each site, how often in a row it came to nothing (`counts`), and until when it has to wait (`until`); both
    may be kept elsewhere. The first `free` times cost nothing."""

    def __init__(
        self,
        counts: MutableMapping[str, int] | None = None,
        until: MutableMapping[str, float] | None = None,
        free: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counts: MutableMapping[str, int] = {} if counts is None else counts
        self.until: MutableMapping[str, float] = {} if until is None else until
        self.free, self.clock = free, clock

    def add(self, site: str, seconds: float) -> float:
        """It came to nothing once more; how long it has to wait from now on: `seconds`, and each time twice as long."""
        self.counts[site] = self.counts.get(site, 0) + 1
        times = self.counts[site] - self.free
        pause = min(LONGEST, seconds * 2.0 ** min(times - 1, 20)) if times > 0 else 0.0
        self.until[site] = self.clock() + pause
        return pause

    def over(self, site: str) -> bool:
        """Whether it need not wait, or no longer."""
        return self.clock() >= self.until.get(site, 0.0)

    def clear(self, site: str) -> None:
        """Something came of it."""
        self.counts.pop(site, None)
        self.until.pop(site, None)
