"""A plan with a lead's signature. A site takes no other: what the server passes on may be its own.

The signature is of the plan's text as the job carries it, so it goes along when the server submits a run's job again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pf2lora.errors import UserError
from pf2lora.federation.protocol.identity import Authority, KitIdentity
from pf2lora.federation.protocol.plan import Plan

LEAD = "lead"  # the role in a lead's certificate
PURPOSE = b"pf2lora plan\n"  # before what is signed: a signature of anything else is none of a plan
REFUSALS = {
    "signature": "the run's plan is not signed with a certificate of this federation, or was changed since",
    "signer": "the run's plan is signed by a participant that is no lead",
    "signer-expired": "the certificate with which the run's plan is signed is not in date: submit it again with a "
    "renewed kit",
    "signer-removed": "the lead who signed the run's plan was removed; the same plan, submitted by another, goes on",
}
"""Why a plan is not taken: codes of a site's problems, and the line that both ends read."""


class PlanRefused(UserError):
    """A plan that no lead of the federation stands for; `code` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(REFUSALS[code])
        self.code = code


@dataclass(frozen=True)
class SignedPlan:
    """A plan's text, the certificate of who signed it, and the signature; one that nobody signed has none."""

    plan: str
    certificate: str = ""
    signature: str = ""

    @classmethod
    def by(cls, lead: KitIdentity, plan: Plan) -> SignedPlan:
        """The plan, signed."""
        text = plan.to_json()
        return cls(text, lead.certificate, lead.sign(PURPOSE + text.encode()))

    def lead(self, authority: Authority, removed: Collection[str]) -> str:
        """The lead who signed it; `PlanRefused` where it was none of this authority, or one of the `removed`."""
        try:
            signer = authority.signer(self.certificate, PURPOSE + self.plan.encode(), self.signature)
        except ValueError:
            raise PlanRefused("signature") from None
        if signer.roles != {LEAD}:
            raise PlanRefused("signer")
        if not signer.in_date:
            raise PlanRefused("signer-expired")
        if signer.name in removed:
            raise PlanRefused("signer-removed")
        return signer.name
