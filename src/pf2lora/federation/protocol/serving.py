"""What the server asks of each site, and serves it: the last answer whole, or as the change of what the site holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pf2lora.core.method import Method
from pf2lora.federation.protocol.messages import encode, to_tensors
from pf2lora.federation.protocol.participants import Participants
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.records import Records
from pf2lora.federation.protocol.run_status import read_final
from pf2lora.federation.protocol.wire import checksum, moved


class Coming(NamedTuple):
    """The last answer as sites are to hold it `(n,)` or `(sites, n)`, and the change by which those come to it that
    hold what was served in the round before; None where there is nothing that a change could be of."""

    whole: Tensor
    change: dict[str, Tensor] | None = None


class Serving(Participants):
    """Requests of a run's rounds, from what was merged."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.done = 0  # finished rounds
        # The method's answer after them: to all, or one for each site. In a private run, its difference to the start.
        self.common: Tensor | None = None
        self.held: Tensor | None = None  # what the last round's sites were served in it, where changes travel
        self.ranks: dict[str, int | None] = {}  # of the last updates; HETLoRA's sites get it truncated to it
        self.records = Records(folder)

    def hello(self) -> bytes:
        """The request that a site introduces itself."""
        return encode({"kind": "hello", "round": self.done + 1})

    def requests(
        self, present: list[str], measured: set[int], more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, bytes]:
        """The next round's request to each site that is there: train, or only measure what was served last. `more` are
        further fields for some of them."""
        number, asked = self.done + 1, {}
        chosen, served = self.chosen(number), self.done in measured
        for site in present:
            fields: dict[str, Any] = {"kind": "train", "round": number}
            if served:
                fields["measure_served"] = True
            if site not in chosen:
                if not served:
                    continue
                fields["kind"] = "measure"
            elif number in measured:
                fields["measure_before"] = True
            asked[site] = fields | dict((more or {}).get(site, {}))
        return self.encoded(asked)

    def finish_requests(self, present: list[str]) -> dict[str, bytes]:
        """After the last round: the last average, to keep and to measure; for those that have not got it."""
        fields = {"kind": "finish", "round": self.done + 1}
        return self.encoded({site: fields for site in present if site in self.unserved()})

    def encoded(self, asked: Mapping[str, dict[str, Any]]) -> dict[str, bytes]:
        """The requests with the last answer in them. Sites that are told the same share the bytes."""
        found, made = dict[str, bytes](), dict[str, bytes]()
        coming, held = self.coming(), None if self.held is None else checksum(self.held)
        for site, wanted in asked.items():
            fields = wanted | self.undo(site)
            tensors = {} if coming is None else self.whole_for(site, coming.whole)
            if coming is not None and coming.change is not None and self.holds(site, fields):
                fields, tensors = fields | {"change_of": held}, coming.change
            own = site if self.apart(site) else ""
            told = repr((own, sorted(fields.items())))
            if told not in made:
                made[told] = encode(fields, tensors)
            found[site] = made[told]
        return found

    def unserved(self) -> list[str]:
        """The sites that have not yet told their last scores."""
        told = read_final(self.folder)
        return [s for s in self.plan.sites if told.get(s, {}).get("round") != self.done + 1]

    def undo(self, site: str) -> dict[str, int]:
        """The round that a site is to undo: its last one, where what it sent then was refused."""
        number = self.records.undone.get(site)
        return {"take_back": number} if number else {}

    # --- the last answer ------------------------------------------------------------------------------------

    def apart(self, site: str) -> bool:
        """Whether a site is served something of its own: its row of the answer, or its rank's part."""
        return self.common is not None and (self.common.dim() > 1 or self.ranks.get(site) is not None)

    def holds(self, site: str, fields: Mapping[str, Any]) -> bool:
        """Whether the site has on its disk what the last round served: it was in that, and is to train again. Whoever
        only measures, or ends, gets all of x: it can be asked no second time."""
        last = self.records.last
        return fields["kind"] == "train" and last is not None and site in last["answered"]

    def coming(self) -> Coming | None:
        """What is served next; nothing before the first average."""
        if self.common is None:
            return None
        method = self.known_method
        layout, before = method.arrives(self.done), method.arrives(max(1, self.done - 1))
        if self.held is None or layout.entries != before.entries:
            return Coming(self.common)
        change = self.wire.answer(layout, self.common, self.held)
        return Coming(moved(layout, self.held, change), change)

    def now_held(self) -> Tensor | None:
        """What the sites of a round that ends now hold, if the next one can be served as its change."""
        coming = self.coming()
        truncated = type(self.known_method).ranks_of is not Method.ranks_of
        if self.wire.exact or truncated or coming is None or coming.whole.dim() > 1:
            return None
        return coming.whole

    def whole_for(self, site: str, answer: Tensor) -> dict[str, Tensor]:
        """An answer, to all or one for each site, as this site gets it whole."""
        own = answer if answer.dim() == 1 else answer[self.plan.sites.index(site)]
        return to_tensors(self.known_method.arrives(self.done), own, self.ranks.get(site), own.dtype)

    def common_for(self, site: str) -> dict[str, Tensor]:
        """Where this site begins its round, by what the server knows: the last answer, not rounded; nothing before the
        first average."""
        return {} if self.common is None else self.whole_for(site, self.common)
