"""A site's half of a masked run's messages, around `secure_sum`; `masked.py` is the server's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from pf2lora.core.method import Method
from pf2lora.errors import UserError
from pf2lora.federation.protocol import approvals, ring
from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.ledger import Ledger
from pf2lora.federation.protocol.messages import Message, encode
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import Policy
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.secure_sum import Keys, LostKeys, SiteSum
from pf2lora.federation.protocol.shamir import majority
from pf2lora.run.privacy import sends_the_adapter_alone


def context(plan: Plan, number: int) -> bytes:
    """What makes keys and shares those of this run and round."""
    return f"{approvals.digest(json.loads(plan.to_json()))} round {number} ".encode()


def start_digest(served: Tensor | None) -> bytes:
    """By which two sites have the same masks: of the x `(n,)` that they were served, or nothing, where all begin as the
    plan says."""
    return b"" if served is None else hashlib.sha256(served.float().contiguous().numpy().data).digest()


def check_maskable(method: Method) -> None:
    """A UserError where one vector, a sum or a median, is not all that the method's server needs."""
    if not sends_the_adapter_alone(method):
        raise UserError(
            f"{method.name}'s updates cannot be masked or merged otherwise: its server needs more than one vector"
        )


class SiteMasks:
    """The masks of a site, round by round. Keys live in memory alone: a site that is started again has lost them, and
    takes part in the next round. Which round was unmasked last is in the `ledger`: none is twice. Whom the site has
    removed is in its `kit`, and looked up in each round."""

    def __init__(self, plan: Plan, site: str, kit: Path, fewest: int, ledger: Ledger) -> None:
        self.plan, self.site, self.kit, self.fewest = plan, site, kit, fewest
        self.identity, self.ledger = KitIdentity.of(kit / "startup"), ledger
        self.now: SiteSum | None = None
        self.number = 0  # the round that this is of

    @classmethod
    def of(cls, plan: Plan, kit: Path, site: str, policy: Policy, ledger: Ledger) -> SiteMasks | None:
        """Of a site with this kit; None where the run has no masks."""
        if not plan.masked:
            return None
        return cls(plan, site, kit, policy.min_sites, ledger)

    def answer(self, request: Message) -> bytes:
        """The reply to a request of one of the masks' own kinds."""
        number, kind = request.round, request.kind
        answer: dict[str, Any] = {"kind": kind, "round": number}
        if kind == "keys":
            self.ledger.check_unsummed(number)
            among, gone = self.plan.chosen(number), removed(self.kit)
            new = SiteSum(self.site, context(self.plan, number), self.identity, among, self.fewest, gone)
            self.now, self.number = new, number
            return encode(answer | {"keys": asdict(new.keys())})
        own = self.of_round(number)
        if kind == "shares":
            roster = {site: Keys(**keys) for site, keys in request.fields["roster"].items()}
            return encode(answer | {"shares": {s: data.hex() for s, data in own.shares(roster).items()}})
        told = own.unmask(request.fields["answered"])
        self.ledger.give_shares(number)  # before anything leaves
        return encode(answer | {"unmask": {s: [what, share.hex()] for s, (what, share) in told.items()}})

    def of_round(self, number: int) -> SiteSum:
        """The sum of this round, which began here."""
        if self.now is None or self.number != number:
            raise LostKeys(f"the keys of round {number} are not here: the site was started again since")
        return self.now

    def mask(self, numbers: Tensor, request: Mapping[str, Any], served: Tensor | None) -> Tensor:
        """An update `(n,)` in the ring, with all masks on it; it began from what was `served`."""
        own = self.of_round(request["round"])
        sealed = {site: bytes.fromhex(data) for site, data in request.get("shares", {}).items()}
        return own.mask(ring.to_ring(numbers, len(own.roster)), sealed, start_digest(served))

    def unopened(self, number: int) -> list[str]:
        """Whose shares of the round this site could not open."""
        return self.of_round(number).unopened

    def noise_share(self, number: int) -> float:
        """The part of a sum's noise, by its variance, that this site adds: that of the fewest who can be summed."""
        return 1 / majority(len(self.of_round(number).among))
