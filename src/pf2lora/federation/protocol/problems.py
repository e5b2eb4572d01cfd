"""What a site may say about its own problems: a code of this list. The details stay in its own log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import OutOfMemoryError

from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.helpers import HelperLost
from pf2lora.engines.room import NoRoom
from pf2lora.errors import UnknownLabel
from pf2lora.federation.protocol.checkpoints import StateFolderError
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.plan import NotShared, Plan
from pf2lora.federation.protocol.policy import PolicyBroken, refusal
from pf2lora.federation.protocol.signed_plan import REFUSALS, PlanRefused

PROBLEMS = {
    "disk-full": "the disk of its state folder is full",
    "unwritable": "its state folder cannot be written",
    "busy": "its state folder is in use by another process",
    "state": "its saved state cannot be used",
    "ahead": "it has done later rounds than the server knows of: was the server restored from an older backup?",
    "loss": "its loss stopped being a number; a smaller lr or client_lr usually helps",
    "update": "its update is many times larger than any before; a smaller lr or client_lr usually helps",
    "data": "its data or model could not be loaded",
    "memory": "its memory is too small",
    "processes": "one of its processes has ended",
    "labels": "its data has labels, or questions without an answer, that the run's --labels do not name",
    "plan": "it does not take the plan: it has done rounds of a run of this name with another one (choose another "
    "--name), or the plan sets what is a site's own",
    "finished": "it has finished these rounds: a longer plan goes on after them, another --name begins anew",
    "policy": "its own policy.toml does not allow the run",
    **REFUSALS,
    "masks": "it refused the round's masks or has lost them",
    "summed": "it has given its shares of this round already",
    "base": "it does not hold what the server sent a change of; it gets all of it next",
    "message": "it cannot use the server's message; is the same version of pf2lora installed there?",
    "refused": "its own allow-list refused the message: nothing was sent",
    "failed": "it failed",
}
"""Each code with what it means to the others."""

OF_A_ROUND = ("loss", "update", "masks", "summed", "base", "refused")
"""Problems of one round: the site is left out of it and takes part in the next. With others it has stopped."""


def problem_code(error: Exception) -> str:
    """The code under which a site tells the server of an error."""
    if isinstance(error, StateFolderError | PlanRefused):
        return error.code
    codes = {
        Diverged: "loss",
        UnknownLabel: "labels",
        PolicyBroken: "policy",
        NotShared: "plan",
        Malformed: "message",
        HelperLost: "processes",
        OutOfMemoryError: "memory",
        NoRoom: "memory",
    }
    for kind, code in codes.items():
        if isinstance(error, kind):
            return code
    return "data"


def problem_fields(error: Exception) -> dict[str, Any]:
    """What a site tells the server of an error: its code, and of its own limits the one that the run breaks."""
    more = error.fields if isinstance(error, PolicyBroken) else {}
    return {"code": problem_code(error)} | more


def told(fields: Mapping[str, Any], plan: Plan) -> str:
    """What a site's problem means, in a line; `fields` are of a message that was checked."""
    if fields["code"] == "policy" and "limit" in fields:
        return refusal(plan, fields["limit"], fields.get("allows"))
    return PROBLEMS[fields["code"]]
