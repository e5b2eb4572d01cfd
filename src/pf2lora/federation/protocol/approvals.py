"""Runs that a person at the site must approve (`approve = true` in its policy.toml): who waits, and who said yes.

One file per run in `approvals/` beside the policy, with the plan as it was asked for. An approval is of that plan and
no other: a plan of the same name that asks for something else waits again.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.errors import UserError
from pf2lora.federation.protocol import policy
from pf2lora.federation.protocol.names import check_name
from pf2lora.federation.protocol.plan import Plan
from pf2lora.parsing import read_json
from pf2lora.run.decode import decode

FOLDER = "approvals"
OF_THE_SERVER = (
    "deadline",
    "final_deadline",
    "quorum",
    "norm_limit",
)  # what may change without a person's being asked again


@dataclass(frozen=True)
class Asked:
    """A run that was asked for. `approved` is the digest of the plan that a person approved, empty before."""

    plan: dict[str, Any]
    asked: float
    approved: str = ""
    by: str = ""
    when: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether nobody has approved this very plan."""
        return self.approved != digest(self.plan)


def digest(plan: dict[str, Any]) -> str:
    """What an approval is of: all that a run does at a site."""
    said = {key: value for key, value in plan.items() if key not in OF_THE_SERVER}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def is_approved(folder: Path, plan: Plan) -> bool:
    """Whether a person approved this plan; one that nobody has seen yet is written down for them. `folder` is the one
    of the policy."""
    file, values = path_of(folder, plan.name), json.loads(plan.to_json())
    known = read(file) if file.exists() else None
    if known is not None and known.approved == digest(values):
        return True
    if known is None or known.plan != values:
        atomic.make_folder(file.parent, 0o700)
        said = (known.approved, known.by, known.when) if known else ("", "", 0.0)
        atomic.write_json(file, asdict(Asked(values, time.time(), *said)))
    return False


def waiting(folder: Path) -> dict[str, Asked]:
    """The runs that nobody has approved as they were last asked for."""
    found = {file.stem: read(file) for file in sorted((folder / FOLDER).glob("*.json"))}
    return {name: asked for name, asked in found.items() if asked.waits}


def asked_for(folder: Path, name: str) -> Asked:
    """A run as it was last asked for."""
    check_name("run", name)
    file = path_of(folder, name)
    if not file.exists():
        raise UserError(f"no run {name!r} was asked for here; the lead submits it first")
    return read(file)


def approve(folder: Path, name: str, shown: str) -> Asked:
    """Approve the plan that a person was `shown`, by its digest: another may have been asked for meanwhile."""
    asked = asked_for(folder, name)
    if shown != digest(asked.plan):
        raise UserError(
            f"the plan {shown} of the run {name!r} is not the one that is asked for now: look at that first, "
            f"`pf2lora federation approve KIT {name}`"
        )
    done = Asked(asked.plan, asked.asked, shown, getpass.getuser(), time.time())
    atomic.write_json(path_of(folder, name), asdict(done))
    return done


def summary(asked: Asked) -> str:
    """What a run asks for, in a line."""
    plan = Plan.from_json(json.dumps(asked.plan))
    run, cost = plan.run, policy.spending(plan)
    private = "no differential privacy" if cost is None else cost.sentence()
    return (
        f"{plan.method} on {run.task.name}, {run.training.rounds} rounds of {run.training.steps} steps, batches of "
        f"{run.training.batch_size}, rank {run.adapter.rank}, with {', '.join(plan.sites)}; "
        f"{'masked' if plan.masked else 'the server sees each update'}; {private}; on the site's own base model"
    )


def read(file: Path) -> Asked:
    """One file, checked."""
    return decode(Asked, read_json(file), str(file))


def path_of(folder: Path, name: str) -> Path:
    """The file of a run."""
    return folder / FOLDER / f"{name}.json"
