"""A plan with a lead's signature. A site takes no other: what the server passes on may be its own.

The signature is of the plan's text as the job carries it, and of when it was given, so it goes along when the server
submits a run's job again. When is beside the plan, not in it: the same plan, signed later, goes on with the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from pf2lora.errors import UserError
from pf2lora.federation.protocol.identity import Authority, KitIdentity, Signer
from pf2lora.federation.protocol.plan import Plan

LEAD = "lead"  # the role in a lead's certificate
PURPOSE = b"pf2lora plan\n"  # before what is signed: a signature of anything else is none of a plan
SKEW = 3600.0  # seconds by which a lead's clock may be ahead
REFUSALS = {
    "signature": "the run's plan is not signed with a certificate of this federation, or was changed since",
    "signer": "the run's plan is signed by a participant that is no lead",
    "signer-expired": "the certificate with which the run's plan is signed is not in date: submit it again with a "
    "renewed kit",
    "signed-later": "the run's plan is signed at a time that is still to come: one of the clocks is wrong",
    "not-named": "the run's plan does not name this site",
    "signer-removed": "the lead who signed the run's plan was removed; the same plan, submitted by another, goes on",
}
"""Why a plan is not taken: codes of a site's problems, and the line that both ends read."""


class PlanRefused(UserError):
    """A plan that no lead of the federation stands for, or for another site; `code` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(REFUSALS[code])
        self.code = code


@dataclass(frozen=True)
class SignedPlan:
    """A plan's text, the certificate of who signed it, the signature, and when it was given, in seconds since 1970; one
    that nobody signed has none."""

    plan: str
    certificate: str = ""
    signature: str = ""
    signed_at: int = 0

    @classmethod
    def by(cls, lead: KitIdentity, plan: Plan) -> SignedPlan:
        """The plan, signed."""
        made = cls(plan.to_json(), lead.certificate, signed_at=int(time.time()))
        return replace(made, signature=lead.sign(made.signed_part()))

    def signed_part(self) -> bytes:
        """What the signature is of."""
        return PURPOSE + json.dumps([self.signed_at, self.plan]).encode()

    def signer(self, authority: Authority) -> Signer:
        """The lead who signed it, in date or not; `PlanRefused` where it was none of this authority."""
        try:
            signer = authority.signer(self.certificate, self.signed_part(), self.signature)
        except ValueError:
            raise PlanRefused("signature") from None
        if signer.roles != {LEAD}:
            raise PlanRefused("signer")
        return signer

    def lead(self, authority: Authority, removed: Collection[str]) -> str:
        """The name of the lead who signed it; `PlanRefused` where nobody may go by it now, as the lead is one of the
        `removed`, say."""
        signer = self.signer(authority)
        if not signer.in_date:
            raise PlanRefused("signer-expired")
        if self.signed_at > time.time() + SKEW:
            raise PlanRefused("signed-later")
        if signer.name in removed:
            raise PlanRefused("signer-removed")
        return signer.name
