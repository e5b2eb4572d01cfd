"""What a site has done for each run, in `_ledger/NAME.json` of its state folder: by this it keeps to the plan's rounds.

It outlives the run's own folder, which may be cleaned up: of a site that had forgotten a masked round a server could
have a second sum of it, without some site, and read that one's update off the difference. What is counted is on the
disk before it happens. To forget a run is its keeper's decision (docs/operations.md).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.errors import UserError
from pf2lora.federation.protocol.agreement import check_same
from pf2lora.federation.protocol.checkpoints import StateFolderError, writing
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import PolicyBroken
from pf2lora.federation.protocol.secure_sum import AlreadySummed
from pf2lora.parsing import read_json
from pf2lora.run.decode import decode

FOLDER = "_ledger"  # no run can be called so


@dataclass(frozen=True)
class Entry:
    """What was done for a run. Its `plan` is the one that was taken last; rounds are 0 where there is none yet."""

    plan: dict[str, Any]
    trainings: int  # that were begun, the same round as often as it was asked for
    summed: int  # the last round of which shares were given away, in a masked run
    finished: int  # the last round when the site was told the end


NOTHING = Entry({}, 0, 0, 0)


class Ledger:
    """The entry of one run, read from the disk each time: `state` is the site's state folder."""

    def __init__(self, state: Path, plan: Plan, site: str, repeats: int) -> None:
        self.plan, self.site, self.repeats = plan, site, repeats
        self.file = state / FOLDER / f"{plan.name}.json"

    def take(self) -> None:
        """Write the plan down. A run in which the site has trained goes on with the same plan, or for longer: another
        one under its name would begin anew what is counted by names, the rounds, runs and ε."""
        entry = self.read()
        if not entry.trainings:
            entry = NOTHING
        else:
            try:
                check_same(self.plan, Plan.from_json(json.dumps(entry.plan)))
            except UserError as error:
                raise StateFolderError(str(error), "plan") from None
        self.write(replace(entry, plan=json.loads(self.plan.to_json())))

    def begin_training(self, number: int) -> None:
        """Count one more training. Where none is left to be had: `PolicyBroken`, or a StateFolderError where the run is
        over with this round."""
        entry = self.read()
        if number <= entry.finished:
            raise StateFolderError(
                f"the server asks for round {number} of the run {self.plan.name!r}, which this site has finished with "
                f"round {entry.finished}: a longer plan goes on after it, another --name begins anew",
                "finished",
            )
        if entry.trainings >= self.own_rounds + self.repeats:
            raise PolicyBroken(self.plan, "max_repeats", self.repeats)
        self.write(replace(entry, trainings=entry.trainings + 1))

    @cached_property
    def own_rounds(self) -> int:
        """In how many rounds the plan has this site."""
        return sum(self.site in self.plan.chosen(n) for n in range(1, self.plan.run.training.rounds + 1))

    @property
    def summed(self) -> int:
        """The last round of which shares were given away."""
        return self.read().summed

    def check_unsummed(self, number: int) -> None:
        """`AlreadySummed` where the round was, or a later one."""
        if number <= self.summed:
            raise AlreadySummed(f"round {number} was summed already; a second sum would tell its parts apart")

    def give_shares(self, number: int) -> None:
        """The shares of a round are about to leave."""
        self.write(replace(self.read(), summed=number))

    def finish(self, number: int) -> None:
        """The server says that the run ended with round `number`."""
        entry = self.read()
        self.write(replace(entry, finished=max(number, entry.finished)))

    def read(self) -> Entry:
        """What is on the disk; a StateFolderError if it cannot be used."""
        return read(self.file) if self.file.exists() else NOTHING

    def write(self, entry: Entry) -> None:
        """All or nothing."""
        with writing(self.file.parent):
            atomic.make_folder(self.file.parent, 0o700)
            atomic.write_json(self.file, asdict(entry))


def read(file: Path) -> Entry:
    """One run's entry, checked."""
    try:
        return decode(Entry, read_json(file), str(file))
    except UserError as error:
        raise StateFolderError(f"the ledger is damaged, put its backup there ({error})", "state") from None


def runs(state: Path) -> list[str]:
    """The runs in which the site of this state folder has trained."""
    return [file.stem for file in sorted((state / FOLDER).glob("*.json")) if read(file).trainings]
