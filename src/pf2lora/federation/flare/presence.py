"""Who takes part in a run, by the server's controller: hellos, who is left out, who comes back, who was removed."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from pf2lora.errors import UserError
from pf2lora.federation.flare.exchange import SiteMessages
from pf2lora.federation.flare.keys import check_known
from pf2lora.federation.protocol.agreement import DoesNotFit, agreeing_first
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.pauses import Pauses
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.run_status import Status, append_line
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.stopping import QuorumMissed

LOADING = 600.0  # seconds for a site to load its data and base model, at least
AGAIN = 5.0  # seconds until a site that was left out by its hello is asked again; each time twice as long
FREE = 2  # new jobs that begin for a site between two of its answers
PAUSE, ROUNDS = (
    60.0,
    5,
)  # then it waits so many seconds, or rounds, if these are longer; each time twice as long


class NewJob(Exception):
    """A site waits that only a new job can take back."""


class Presence(SiteMessages):
    """The sites of a plan. `folder` is the run's in the server's kit."""

    session: ServerSession
    folder: Path

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.present: list[str] = []
        self.awaited: set[str] = set()  # sites with a standing hello
        self.returned: dict[str, object] = {}  # those that answered it, with their answer
        self.status = Status("running", 0, plan.run.training.rounds)
        self.asked_again = Pauses()  # of sites that were left out by their hello
        self.came_back = Pauses(free=FREE)  # of sites for which new jobs began

    def remember(self, before: Status | None) -> None:
        """Go on with what the run's last job knew of sites that came back."""
        if before is not None:
            self.status.returns, self.status.paused = before.returns, before.paused
        self.came_back = Pauses(self.status.returns, self.status.paused, FREE)

    def collect_hellos(self) -> None:
        """Every connected site says what it brings. One that does not fit, or cannot take part, is left out and named;
        where no more sites fit together than do not, nobody can say who is right, and the run does not begin."""
        plan, known = self.plan, {c.name for c in self.fl_ctx.get_engine().get_clients()}
        connected = [s for s in plan.sites if s in known]
        if self.session.over:  # some were away at its end
            connected = [s for s in connected if s in self.session.unserved()]
        elif self.session.done == 0:
            self.check_names()
        append_line(
            self.folder,
            f"run {plan.name!r}: {len(connected)} of {len(plan.sites)} sites, rounds {self.session.done + 1} to "
            f"{plan.run.training.rounds}, deadline {plan.deadline:g} s, quorum {plan.quorum:g} of a round's sites",
        )
        timeout = max(LOADING, plan.deadline)
        answers = self.exchange("hello", dict.fromkeys(connected, self.session.hello()), timeout)
        misfits = []
        for site in agreeing_first(answers, self.session.allow_list(None)):
            try:
                self.admit(site, answers[site])
            except DoesNotFit as error:
                misfits.append(error)
        if self.session.done == 0 and len(misfits) >= max(1, len(self.present)):
            raise misfits[0]
        for site in connected:
            if site not in answers:
                self.drop(site, f"did not say hello {self.until(site, timeout)}")
        if len(self.present) < plan.needed(len(plan.sites)) and not self.session.over:
            left_out = self.status.left_out
            missing = [s for s in plan.sites if s not in self.present and s not in left_out]
            raise QuorumMissed(self.session.done + 1, 0, len(plan.sites), plan, missing, left_out)

    def check_names(self) -> None:
        """A UserError that names a site of the plan that there is none of, before anybody waits for it."""
        check_known(self.root, self.plan.sites)

    def admit(self, site: str, data: object) -> None:
        """Take a site in by its hello. One that cannot be read leaves that site out, until it is started again; one
        with a problem, or that does not fit the others (`DoesNotFit`), is asked again after a while."""
        try:
            self.session.register(site, data)
            self.present = [s for s in self.plan.sites if s in {*self.present, site}]
            self.status.left_out.pop(site, None)
            self.asked_again.clear(site)
        except Malformed as error:
            self.leave_out(
                site, f"its hello cannot be read ({error}); install the same version of pf2lora there"
            )
        except UserError as error:
            self.leave_out(site, str(error).removeprefix(f"{site} "))
            self.asked_again.add(site, AGAIN)
            if isinstance(error, DoesNotFit):
                raise

    def leave_out(self, site: str, why: str) -> None:
        """Say, once, why a site takes no part."""
        if self.status.left_out.get(site) != why:
            append_line(self.folder, f"{site} is left out: {why}")
        self.status.left_out[site] = why

    def drop(self, site: str, why: str) -> None:
        """Later rounds do not wait for the site; a standing hello finds out when it is back."""
        self.present = [s for s in self.present if s != site]
        append_line(self.folder, f"{site} {why}; going on without it")
        self.await_return(site)

    def await_return(self, site: str) -> None:
        """Leave a hello without a time limit for a site; its answer is in `returned`."""
        if site not in self.awaited:
            self.awaited.add(site)
            self.post(
                "hello", site, self.session.hello(), 0, lambda data: self.returned.__setitem__(site, data)
            )

    def take_back(self) -> None:
        """Take back who answered, leave out who was removed; `NewJob` if one waits whom only a new job takes back."""
        with self.changed:
            returned, self.returned = dict(self.returned), {}
        for site, data in returned.items():
            self.awaited.discard(site)
            with suppress(DoesNotFit):
                self.admit(site, data)
            if site in self.present:
                append_line(self.folder, f"{site} is back")
        gone = removed(self.root)
        for site in self.plan.sites:
            if site in gone:
                self.present = [s for s in self.present if s != site]
                self.leave_out(site, "it was removed from the federation")
            elif site not in self.present:
                if self.needs_new_job(site):
                    self.begin_again(site)
                elif site in self.asked_again.until and self.asked_again.over(site):
                    self.await_return(site)

    def begin_again(self, site: str) -> None:
        """`NewJob`, to take a site back; unless it was started again and again and answered nothing in between: then
        the others have some rounds to themselves first."""
        if not self.came_back.over(site):
            times, until = self.came_back.counts[site], time.gmtime(self.came_back.until[site])
            self.leave_out(
                site,
                f"it was started again {times + 1} times and answered nothing in between; it is taken back "
                f"{time.strftime('%H:%M:%S', until)} UTC or later",
            )
            return
        self.came_back.add(site, max(PAUSE, ROUNDS * (self.status.seconds or 0.0)))
        append_line(self.folder, f"{site} is back: the run continues with it in a new job")
        raise NewJob

    def answered(self, sites: list[str]) -> None:
        """These sites answered a round: what went before is forgotten."""
        for site in sites:
            self.came_back.clear(site)
