"""The server's half of a masked run's messages, around `secure_sum`: it sees sums alone. `site_masks.py` is a site's.

A round has four exchanges in place of one: keys, shares, the round itself with masked updates, and shares of what is to
be taken away. Whoever is missing or refused in one is not in the next. Where somebody's doing leaves no sum to be had,
the round is tried again without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from pf2lora.federation.protocol import private, ring
from pf2lora.federation.protocol.answers import Answer
from pf2lora.federation.protocol.identity import Authority
from pf2lora.federation.protocol.messages import Malformed, Message, encode
from pf2lora.federation.protocol.secure_sum import Keys, Refused, check_keys
from pf2lora.federation.protocol.server_sum import BadDealer, ServerSum
from pf2lora.federation.protocol.site_masks import context, start_digest

if TYPE_CHECKING:
    from pf2lora.federation.protocol.server import ServerSession

logger = logging.getLogger("pf2lora")

Take = Callable[[str, object], object]
"""What is kept of a site's answer, read when it arrives."""


class Exchange(Protocol):
    """Sends every site its request, under a name for the step; what came back in time, or what `take` made of it."""

    def __call__(
        self, name: str, requests: Mapping[str, bytes], /, *, take: Take = ...
    ) -> Mapping[str, object]: ...


class Summed(NamedTuple):
    """The sum of the sites that answered a round, or why there is none."""

    sites: list[str]
    total: Tensor | None  # (n,) in float64
    why: str = ""


def ask(
    session: ServerSession, present: Sequence[str], measured: set[int], exchange: Exchange, startup: Path
) -> tuple[dict[str, object], Summed | None]:
    """The answers to the next round's requests, and in a masked run the sum of the updates in them. `startup` is the
    server's kit's, which has the authority's certificate."""
    if not session.plan.masked:
        return dict(exchange("round", session.requests(list(present), measured), take=session.arrived)), None
    chosen, authority = session.chosen(session.done + 1), Authority.of(startup)
    answers = {s: Answer(0, why=why) for s, why in session.barred.items() if s in present and s in chosen}
    there = [site for site in present if site in chosen and site not in answers]
    asides = [site for site in present if site not in chosen]  # who only measure
    while True:
        attempt = MaskedRound(session, authority, exchange)
        answers |= attempt.updates(there, asides, measured)
        at_fault = attempt.at_fault()
        if not at_fault:
            return dict(answers), attempt.unmasked()
        there, asides = [site for site in attempt.sum.answered if site not in at_fault], []
        answers = {site: answer for site, answer in answers.items() if site not in there} | at_fault


class MaskedRound:
    """One try at the sum of the next round."""

    def __init__(self, session: ServerSession, authority: Authority, exchange: Exchange) -> None:
        self.session, self.authority, self.exchange = session, authority, exchange
        self.number = session.done + 1
        size, among = session.known_method.leaves(self.number).size, session.chosen(self.number)
        start = start_digest(session.common)
        self.sum = ServerSum(context(session.plan, self.number), size, among, start=start)

    def updates(self, there: Sequence[str], asides: Sequence[str], measured: set[int]) -> dict[str, Answer]:
        """All that this try has of a site: its update, or what it answered instead in one of the steps."""
        answers = self.step("keys", dict.fromkeys(there, encode({"kind": "keys", "round": self.number})))
        if len(self.sum.roster) < self.sum.least:
            few = f"a masked sum takes {self.sum.least} sites, and {len(self.sum.roster)} are left"
            return answers | {site: Answer(0, why=few) for site in self.sum.roster}
        roster = {site: asdict(keys) for site, keys in self.sum.roster.items()}
        asked = encode({"kind": "shares", "round": self.number, "roster": roster})
        answers |= self.step("shares", dict.fromkeys(self.sum.roster, asked))
        sealed = {
            site: {"shares": {s: v.hex() for s, v in self.sum.shares_for(site).items()}}
            for site in self.sum.sealed
        }
        requests = self.session.requests([*sealed, *asides], measured, sealed)
        found = self.exchange("round", requests, take=self.arrived)
        return answers | {site: answer for site, answer in found.items() if isinstance(answer, Answer)}

    def step(self, kind: str, requests: Mapping[str, bytes]) -> dict[str, Answer]:
        """One exchange of the masks' own; of whom the round has something else than what was asked for."""
        taken = {site: self.take(kind, site, data) for site, data in self.exchange(kind, requests).items()}
        return {site: answer for site, answer in taken.items() if answer is not None}

    def take(self, kind: str, site: str, data: object) -> Answer | None:
        """A site's answer of `kind`; None where it is as it must be, else the site's problem or why it is left out."""
        try:
            message = self.session.read_answer(data, kind, self.number)
            if message.kind == kind:
                self.keep(site, message)
                return None
        except (Malformed, Refused) as error:
            logger.warning("%s in step %r of round %d: %s", site, kind, self.number, error)
            return Answer(len(data) if isinstance(data, bytes) else 0, why=str(error))
        return self.session.arrived(site, data)

    def keep(self, site: str, message: Message) -> None:
        """What an answer says, checked as far as the server can; else `Refused`."""
        found = message.fields[message.kind]
        match message.kind:
            case "keys":
                keys = Keys(**found)
                check_keys(self.authority, self.sum.context, site, keys)
                self.sum.roster[site] = keys
            case "shares":
                self.sum.take_shares(site, {other: bytes.fromhex(data) for other, data in found.items()})
            case _:
                told = {other: (what, bytes.fromhex(share)) for other, (what, share) in found.items()}
                self.sum.take_unmasking(site, told)

    def arrived(self, site: str, data: object) -> Answer:
        """A site's answer to the round itself."""
        answer = self.session.arrived(site, data, keep=self.sum.add)
        if answer.message is not None:
            self.sum.unopened[site] = answer.message.fields.pop("unopened", ())
        return answer

    def at_fault(self) -> dict[str, Answer]:
        """Who is left out of another try. Who dealt shares that cannot be opened is not asked again."""
        dealers, doubters = self.sum.at_fault()
        self.session.barred |= dealers
        return {site: Answer(0, why=why) for site, why in (dealers | doubters).items()}

    def unmasked(self) -> Summed:
        """What the server knows at the end."""
        answered = list(self.sum.answered)
        if not answered:
            return Summed([], None, "no site answered")
        asked = encode({"kind": "unmask", "round": self.number, "answered": answered})
        self.step("unmask", dict.fromkeys(answered, asked))
        try:
            return Summed(answered, ring.from_ring(self.sum.unmask()))
        except BadDealer as error:
            self.session.barred[error.site] = str(error)
            return Summed(answered, None, str(error))
        except Refused as error:
            return Summed(answered, None, str(error))


def lost_sum(session: ServerSession, summed: Summed, problems: Mapping[str, str], asked: int) -> bool:
    """Whether a round is over without a sum: sites gave shares away, which they do once, and too few are left to give
    others. It then counts for nobody, and the run goes on with the next."""
    chosen, needed = session.chosen(session.done + 1), session.plan.needed(asked)
    given = [site for site in chosen if problems.get(site) == "summed"]
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
