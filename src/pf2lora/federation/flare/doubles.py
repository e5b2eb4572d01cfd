"""Which sites are connected, so that a second one with the same kit can be told from one that was started again.

FLARE's transport gives an endpoint's name to the newest connection. So the second is refused when it registers, ends,
and the first, whose connection was taken, connects again by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BEATS = 25.0  # seconds in which a site that lives is heard of: its heart beats every ten
BESIEGED = 120.0  # the same where doubles of it were refused


class Connections:
    """What the server's main process knows of its sites since it was started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last: dict[str, float] = {}  # when a registered site was heard of
        self.gone: set[str] = set()  # whose connection has closed since
        self.doubled: set[str] = (
            set()
        )  # whose double was refused since: a connection that closes is the double's

    def heard(self, site: str) -> None:
        """A site registered, or its heart beats."""
        self.last[site] = self.clock()
        self.gone.discard(site)
        self.doubled.discard(site)

    def closed(self, site: str) -> None:
        """A connection was closed. Who is killed closes it, too; whose connection was taken by another does not."""
        if site not in self.doubled:
            self.gone.add(site)

    def lives(self, site: str) -> bool:
        """Whether a site of this name is connected and heard of."""
        return site not in self.gone and self.heard_lately(site)

    def heard_lately(self, site: str) -> bool:
        """Whether a site's heart may still be beating. Doubles that come again and again take its connection each time:
        it has longer then."""
        patience = BESIEGED if site in self.doubled else BEATS
        return site in self.last and self.clock() - self.last[site] < patience

    def refused(self, site: str) -> None:
        """A second site of this name was refused."""
        self.doubled.add(site)
