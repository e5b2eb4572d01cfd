"""What happens at a participant, as events for a log: whatever changed in its kit since the last look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pf2lora.federation.protocol.metrics import Participant, connected, runs
from pf2lora.federation.protocol.run_status import Status

Happened = tuple[str, dict[str, Any]]
"""An event's name and its values."""


class KitEvents:
    """Looks at a kit; runs that were there before are no news."""

    def __init__(self, who: Participant) -> None:
        self.who, self.runs = who, runs(who.kit)
        self.sites: list[str] = []

    def look(self) -> Iterator[Happened]:
        """What has changed."""
        if self.who.server:
            there = list(connected(self.who.kit))
            if there != self.sites:
                yield "sites", {"connected": there}
            self.sites = there
        before, self.runs = self.runs, runs(self.who.kit)
        for run, now in self.runs.items():
            yield from changes(run, before.get(run), now)


def changes(run: str, before: Status | None, now: Status) -> Iterator[Happened]:
    """A run's finished round, and another state or another line about it."""
    if now.round > (before.round if before else 0):
        yield (
            "round_ended",
            {"run": run, "round": now.round, "rounds": now.rounds, "loss": now.loss, "seconds": now.seconds}
            | ({"present": now.present} if now.present else {})
            | ({"left_out": now.left_out} if now.left_out else {}),
        )
    if before is None or (before.state, before.line) != (now.state, now.line):
        yield "run_state", {"run": run, "state": now.state, "round": now.round, "line": now.line}
