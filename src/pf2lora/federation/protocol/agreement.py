"""What must be alike: at all sites, for an average of their adapters to mean something; in a run that is resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.errors import UserError
from pf2lora.federation import ENGINE_NAME
from pf2lora.federation.protocol.allow_list import AllowList
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.plan import Plan
from pf2lora.parsing import read_text

MUST_AGREE = (
    "version",
    "engine",
    "model",
    "labels",
    "label_count",
    "layout",
)  # of what sites say of themselves
# Between a run's beginning and its resumption.
MAY_CHANGE = ("deadline", "final_deadline", "wait", "quorum", "norm_limit", "rounds", "patience")


class DoesNotFit(UserError):
    """A site that has something else than the others."""


def check_fits(site: str, facts: Mapping[str, Any], other: str, theirs: Mapping[str, Any]) -> None:
    """`DoesNotFit` where two sites do not agree on what makes an average of their adapters meaningful."""
    if facts["version"] != theirs["version"]:
        raise DoesNotFit(
            f"{site} runs pf2lora {facts['version']}, {other} {theirs['version']}: install the same version everywhere"
        )
    if facts["engine"] != theirs["engine"]:
        raise DoesNotFit(
            f"{site} runs {ENGINE_NAME} {facts['engine']}, {other} {theirs['engine']}: install the same version"
        )
    if facts["model"] != theirs["model"]:
        raise DoesNotFit(
            f"{site} has another base model than {other} (the digests of config and weights differ): give {site} a "
            f"copy of the same model folder"
        )
    if (facts["labels"], facts["label_count"]) != (theirs["labels"], theirs["label_count"]):
        raise DoesNotFit(
            f"{site} has other labels than {other} ({facts['label_count']} and {theirs['label_count']}): name all "
            f"labels in the run's `labels`"
        )
    if facts["layout"] != theirs["layout"]:
        raise DoesNotFit(
            f"{site}'s common adapter has other layers or shapes than {other}'s: use the same model"
        )


def agreeing_first(answers: Mapping[str, object], allowed: AllowList) -> list[str]:
    """Who answered a hello, those before all others of which the most have the same: one that is alone with what it has
    should not be the measure of the rest. Answers that cannot be read say nothing."""
    alike: dict[str, tuple[str, ...]] = {}
    for site, data in answers.items():
        with suppress(Malformed):
            told = allowed.check(data, ("hello",)).fields
            alike[site] = tuple(json.dumps(told.get(key)) for key in MUST_AGREE)
    votes = Counter(alike.values())
    return sorted(answers, key=lambda site: -votes[alike[site]] if site in alike else 1)


def keep_plan(plan: Plan, file: Path) -> None:
    """Write the plan of a run down, if it goes on with the one that is there."""
    if file.exists():
        check_same(plan, Plan.from_json(read_text(file)))
    atomic.write_json(file, asdict(plan))


def check_same(plan: Plan, before: Plan) -> None:
    """A UserError where this plan does not go on with the one `before`. A name is one run: what makes its numbers may
    not change when it is resumed. It may go on for longer, unless its noise was found for a number of rounds."""
    now, then = (json.loads(p.to_json()) for p in (plan, before))
    fixed = ("rounds",) if plan.run.privacy.dp_epsilon is not None else ()
    free = [name for name in MAY_CHANGE if name not in fixed]
    for key, value in now.items():
        old = then[key]
        if key == "config":
            value, old = (without(tables, free) for tables in (value, old))
        if key not in MAY_CHANGE and value != old:
            raise UserError(f"the run {plan.name!r} exists with another {key}: choose another --name")


def without(tables: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A config's tables without the settings of these names."""
    return {table: {k: v for k, v in values.items() if k not in names} for table, values in tables.items()}
