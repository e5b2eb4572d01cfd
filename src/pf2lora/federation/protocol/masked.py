"""A masked run's messages: what site and server say to each other around `secure_sum`: the server sees sums alone.

A round has four exchanges in place of one: keys, shares, the round itself with masked updates, and shares of what is to
be taken away. Whoever is missing or refused in one is not in the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from pf2lora import atomic
from pf2lora.core.method import Method
from pf2lora.errors import UserError
from pf2lora.federation.protocol import approvals, private, ring
from pf2lora.federation.protocol.checkpoints import StateFolderError, writing
from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.messages import Malformed, Message, encode
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import Policy
from pf2lora.federation.protocol.secure_sum import (
    AlreadySummed,
    Keys,
    LostKeys,
    Refused,
    ServerSum,
    SiteSum,
    threshold,
)
from pf2lora.parsing import read_text
from pf2lora.run.privacy import sends_the_adapter_alone

if TYPE_CHECKING:
    from pf2lora.federation.protocol.server import ServerSession

SUMMED = "summed-round"
Take = Callable[[str, object], object]
"""What is kept of a site's answer, read when it arrives."""


class Exchange(Protocol):
    """Sends every site its request, under a name for the step; what came back in time, or what `take` made of it."""

    def __call__(
        self, name: str, requests: Mapping[str, bytes], /, *, take: Take = ...
    ) -> Mapping[str, object]: ...


def context(plan: Plan, number: int) -> bytes:
    """What makes keys and shares those of this run and round."""
    return f"{approvals.digest(json.loads(plan.to_json()))} round {number} ".encode()


def check_maskable(method: Method) -> None:
    """A UserError where one vector, a sum or a median, is not all that the method's server needs."""
    if not sends_the_adapter_alone(method):
        raise UserError(
            f"{method.name}'s updates cannot be masked or merged otherwise: its server needs more than one vector"
        )


# --- a site ------------------------------------------------------------------------------------------------


class SiteMasks:
    """The masks of a site, round by round. Keys live in memory alone: a site that is started again has lost them, and
    takes part in the next round. Which round was unmasked last is in the state `folder`: none is twice."""

    def __init__(self, plan: Plan, site: str, identity: KitIdentity, fewest: int, folder: Path) -> None:
        self.plan, self.site, self.identity, self.fewest = plan, site, identity, fewest
        self.file = folder / SUMMED
        self.now: SiteSum | None = None
        self.number = 0  # the round that this is of

    @classmethod
    def of(cls, plan: Plan, kit: Path, site: str, policy: Policy, folder: Path) -> SiteMasks | None:
        """Of a site with this kit; None where the run has no masks."""
        if not plan.masked:
            return None
        return cls(plan, site, KitIdentity.of(kit / "startup"), policy.min_sites, folder)

    def summed(self) -> int:
        """The last round of which this site gave shares away, from its disk."""
        if not self.file.exists():
            return 0
        text = read_text(self.file).strip()
        if not re.fullmatch(r"[0-9]{1,15}", text):
            raise StateFolderError(f"{self.file} is damaged: it holds no number of a round", "state")
        return int(text)

    def answer(self, request: Message) -> bytes:
        """The reply to a request of one of the masks' own kinds."""
        number, kind = request.round, request.kind
        answer: dict[str, Any] = {"kind": kind, "round": number}
        if kind == "keys":
            if number <= self.summed():
                raise AlreadySummed(
                    f"round {number} was summed already; a second sum would tell its parts apart"
                )
            new = SiteSum(self.site, context(self.plan, number), self.identity, self.fewest)
            self.now, self.number = new, number
            return encode(answer | {"keys": asdict(new.keys())})
        own = self.of_round(number)
        if kind == "shares":
            roster = {site: Keys(**keys) for site, keys in request.fields["roster"].items()}
            return encode(answer | {"shares": {s: data.hex() for s, data in own.shares(roster).items()}})
        told = own.unmask(request.fields["answered"])
        with writing(self.file.parent):  # before anything leaves
            atomic.write_text(self.file, f"{number}\n")
        return encode(answer | {"unmask": {s: [what, share.hex()] for s, (what, share) in told.items()}})

    def of_round(self, number: int) -> SiteSum:
        """The sum of this round, which began here."""
        if self.now is None or self.number != number:
            raise LostKeys(f"the keys of round {number} are not here: the site was started again since")
        return self.now

    def mask(self, numbers: Tensor, request: Mapping[str, Any]) -> Tensor:
        """An update `(n,)` in the ring, with all masks on it."""
        own = self.of_round(request["round"])
        sealed = {site: bytes.fromhex(data) for site, data in request.get("shares", {}).items()}
        return own.mask(ring.to_ring(numbers, len(own.roster)), sealed)

    def noise_share(self, number: int) -> float:
        """The part of a sum's noise, by its variance, that this site adds: that of the fewest who can be summed."""
        return 1 / threshold(len(self.of_round(number).roster))


# --- the server --------------------------------------------------------------------------------------------


class Summed(NamedTuple):
    """The sum of the sites that answered a round, or why there is none."""

    sites: list[str]
    total: Tensor | None  # (n,) in float64
    why: str = ""


def ask(
    session: ServerSession, present: Sequence[str], measured: set[int], exchange: Exchange
) -> tuple[dict[str, object], Summed | None]:
    """The answers to the next round's requests, and in a masked run the sum of the updates in them."""
    if not session.plan.masked:
        return dict(exchange("round", session.requests(list(present), measured), take=session.arrived)), None
    number = session.done + 1
    server = ServerSum(context(session.plan, number), session.known_method.leaves(number).size)
    taking_part = [site for site in present if site in session.chosen(number)]

    def step(
        kind: str, requests: Mapping[str, bytes], take: Callable[[str, Message], None]
    ) -> dict[str, object]:
        """One exchange. An answer that is none of `kind`, or not as it must be, is returned as it is."""
        others: dict[str, object] = {}
        for site, data in exchange(kind, requests).items():
            try:
                message = session.read_answer(data, kind, number)
                if message.kind == kind:
                    take(site, message)
                    continue
            except (Malformed, Refused):
                pass
            others[site] = data
        return others

    fields = {"round": number}
    answers = step(  # all that this round has of a site that answers something else
        "keys",
        dict.fromkeys(taking_part, encode({"kind": "keys"} | fields)),
        lambda site, m: server.roster.__setitem__(site, Keys(**m.fields["keys"])),
    )
    roster = {site: asdict(keys) for site, keys in server.roster.items()}
    answers |= step(
        "shares",
        dict.fromkeys(server.roster, encode({"kind": "shares", "roster": roster} | fields)),
        lambda site, m: server.take_shares(
            site, {s: bytes.fromhex(v) for s, v in m.fields["shares"].items()}
        ),
    )
    sealed = {
        site: {"shares": {s: v.hex() for s, v in server.shares_for(site).items()}} for site in server.sealed
    }
    requests = session.requests(list(present), measured, sealed)
    asked = {s: data for s, data in requests.items() if s in sealed or s not in taking_part}
    answers |= exchange("round", asked, take=partial(session.arrived, keep=server.add))
    answered = list(server.answered)
    step(
        "unmask",
        dict.fromkeys(answered, encode({"kind": "unmask", "answered": answered} | fields)),
        lambda site, m: server.take_unmasking(
            site, {s: (what, bytes.fromhex(share)) for s, (what, share) in m.fields["unmask"].items()}
        ),
    )
    return answers, unmasked(server)


def unmasked(server: ServerSum) -> Summed:
    """What the server knows at the end."""
    if not server.answered:
        return Summed([], None, "no site answered")
    try:
        total, _ = server.unmask()
    except Refused as error:
        return Summed(server.answered, None, str(error))
    return Summed(server.answered, ring.from_ring(total))


def lost_sum(session: ServerSession, summed: Summed, problems: Mapping[str, str], asked: int) -> bool:
    """Whether a round is over without a sum: sites gave shares away, which they do once, and too few are left to give
    others. It then counts for nobody, and the run goes on with the next."""
    given, needed = [site for site, code in problems.items() if code == "summed"], session.plan.needed(asked)
    if summed.total is not None and asked - len(given) >= needed:
        return False
    sizes = [session.known_method.arrives(n).size for n in (max(1, session.done), session.done + 1)]
    fits = session.common is None or sizes[0] == sizes[1]  # the last answer is the next one's too
    return fits and (len(summed.sites) >= needed or bool(given))


def merge_sum(session: ServerSession, total: Tensor, count: int) -> None:
    """The method's answer where only the sum over `count` sites is known; noise is in it already."""
    method, number, mean = session.known_method, session.done + 1, total / count
    if session.privacy is not None:
        moved = total / len(session.chosen(number))
        mean = private.last_answer(method, session.common, number) + moved
    session.common, session.kept = method.merge(private.one_row(mean, number), session.kept)
