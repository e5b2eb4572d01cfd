"""A site's own limits, `local/policy.toml`: what a run may ask of it. Nothing that a lead or a server sends changes
them.

A run that asks for more is refused before data or model is loaded. The server is told which limit it was, and both
sides make the same line of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora.errors import UserError
from pf2lora.federation.protocol.names import check_sites
from pf2lora.federation.protocol.plan import Plan
from pf2lora.methods import METHODS
from pf2lora.parsing import read_toml
from pf2lora.run import privacy
from pf2lora.settings import from_table, require_not_negative, require_positive, setting, settings_of
from pf2lora.tasks import TASKS

POLICY_FILE = "policy.toml"
DAY = 86400.0  # seconds
WORD = re.compile(r"[A-Za-z0-9_@. -]{1,40}")  # a metric's name


@dataclass(frozen=True)
class Policy:
    """The defaults are what a site has that says nothing. A list that is empty allows all."""

    min_batch_size: int = setting(4, "smallest batch, that of the second-order term (`zeta_size`) included")
    min_steps: int = setting(2, "fewest local steps in a round")
    min_rows: int = setting(
        8,
        "fewest rows behind a number that leaves: of a round's steps, of the training data, of a test or validation "
        "score (one of fewer rows stays at home)",
    )
    max_rounds: int = setting(1000, "most rounds of a run")
    max_repeats: int = setting(
        20,
        "how often, beyond the plan's rounds, the site trains for a run: a round is asked for again after a crash",
    )
    max_runs: int = setting(100, "most runs that the site takes part in: those in which it has trained")
    max_plan_days: int = setting(90, "how many days ago the lead may have signed the plan of a run")
    max_epsilon: float | None = setting(
        None, "largest ε of a run; one without noise costs any amount (default: every run is taken)"
    )
    max_delta: float = setting(
        1e-5,
        "with max_epsilon: largest δ of a run. An ε is of a δ, and the larger that is, the less noise it takes",
    )
    tasks: tuple[str, ...] = setting((), "the tasks that it takes part in")
    methods: tuple[str, ...] = setting((), "the methods that it takes part in")
    metrics: tuple[str, ...] = setting((), "the scores that may leave, of those that the task has")
    models: tuple[str, ...] = setting(
        (), "the base models that may be trained on its rows, by their digest or as site.toml names them"
    )
    sites: tuple[str, ...] = setting((), "the sites that it takes part in runs with")
    masked: bool = setting(False, "only runs whose updates are masked: the server sees their sum alone")
    min_sites: int = setting(3, "in a masked run: fewest sites whose sum the server may see")
    approve: bool = setting(False, "a person must approve each run: `pf2lora federation approve`")
    public_batch_order: bool = setting(
        False,
        "draw batches by the run's seed alone, which the server knows, as `pf2lora train` does: for rehearsals",
    )

    def __post_init__(self) -> None:
        require_positive(
            self,
            "min_batch_size",
            "min_steps",
            "min_rows",
            "max_rounds",
            "max_plan_days",
            "max_epsilon",
            "max_delta",
        )
        require_not_negative(self, "max_runs", "max_repeats")
        if self.max_delta >= 1:
            raise UserError(f"max_delta is {self.max_delta}; it is a probability, below 1")
        if self.min_sites < 2:
            raise UserError(f"min_sites is {self.min_sites}; a sum of fewer than 2 hides nothing")
        check_sites(self.sites)
        for name in self.methods:
            METHODS.check(name)
        for name in self.tasks:
            TASKS.check(name)
        for name in self.metrics:
            if not WORD.fullmatch(name):
                raise UserError(f"metrics names {name!r}, which is no score's name")

    def metrics_of(self, task: tuple[str, ...]) -> tuple[str, ...]:
        """The scores that may leave, of those that a task has."""
        return tuple(name for name in task if not self.metrics or name in self.metrics)

    def leaving(self, found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Counts of rows and sums over them as far as they may leave. Of fewer rows than `min_rows` nothing does, their
        number included."""
        enough = {key: sums["rows"] >= self.min_rows for key, sums in found.items()}
        return {
            key: {
                name: value
                for name, value in sums.items()
                if name == "rows" or key == "validation" or not self.metrics or name in self.metrics
            }
            if enough[key]
            else {"rows": 0}
            for key, sums in found.items()
            if enough[key] or key != "validation"
        }


LIMITS = tuple(name for name in settings_of(Policy) if name not in ("metrics", "public_batch_order"))
"""What a run can break."""


class PolicyBroken(UserError):
    """A run asks for more than the site allows. `limit` names what it breaks, `allows` is its value where that is a
    number."""

    def __init__(self, plan: Plan, limit: str, allows: float | None = None) -> None:
        super().__init__(refusal(plan, limit, allows))
        self.fields: dict[str, Any] = {"limit": limit} | ({} if allows is None else {"allows": allows})


def read_policy(path: Path) -> Policy:
    """The site's policy, checked; the defaults where it has none."""
    if not path.exists():
        return Policy()
    found: Policy = from_table(Policy, read_toml(path), str(path))
    return found


def to_toml(policy: Policy) -> str:
    """The policy as its file, each key with what it means."""
    import tomli_w

    lines = ["# What this site lets a run ask of it (docs/federation.md). A list that is empty allows all.\n"]
    for name, field in settings_of(Policy).items():
        value = getattr(policy, name)
        lines.append(f"\n# {field.metadata['help']}\n")
        lines.append(f"# {name} =\n" if value is None else tomli_w.dumps({name: value}))
    return "".join(lines)


# --- what a run asks ---------------------------------------------------------------------------------------


def check_plan(policy: Policy, plan: Plan, runs: int) -> None:
    """`PolicyBroken` where the plan asks for more than the policy allows; the site has trained for `runs` others."""
    values = asked(plan)
    for name in ("min_batch_size", "min_steps", "min_rows", *(("min_sites",) if plan.masked else ())):
        if values[name] < getattr(policy, name):
            raise PolicyBroken(plan, name, getattr(policy, name))
    if values["max_rounds"] > policy.max_rounds:
        raise PolicyBroken(plan, "max_rounds", policy.max_rounds)
    if policy.masked and not plan.masked:
        raise PolicyBroken(plan, "masked")
    if runs >= policy.max_runs:
        raise PolicyBroken(plan, "max_runs", policy.max_runs)
    for name, value in (("tasks", plan.run.task.name), ("methods", plan.method)):
        if getattr(policy, name) and value not in getattr(policy, name):
            raise PolicyBroken(plan, name)
    if policy.sites and not set(plan.sites) <= set(policy.sites):
        raise PolicyBroken(plan, "sites")
    if policy.max_epsilon is not None and METHODS[plan.method].federated:
        cost = spending(plan)
        if cost is None or cost.epsilon is None or cost.epsilon > policy.max_epsilon:
            raise PolicyBroken(plan, "max_epsilon", policy.max_epsilon)
        if cost.delta > policy.max_delta:
            raise PolicyBroken(plan, "max_delta", policy.max_delta)


def check_age(policy: Policy, plan: Plan, signed_at: float) -> None:
    """`PolicyBroken` where the plan was signed too long ago: a server could come with it as long as it has it."""
    if time.time() - signed_at > policy.max_plan_days * DAY:
        raise PolicyBroken(plan, "max_plan_days", policy.max_plan_days)


def asked(plan: Plan) -> Mapping[str, int]:
    """What the plan asks for, by the limit on it."""
    # With torch, which a site's main process does without.
    from pf2lora.run.set_up import method_settings

    training = plan.run.training
    second = method_settings(plan.run, plan.method).get("zeta_size")
    return {
        "min_batch_size": min(training.batch_size, second or training.batch_size),
        "min_steps": training.steps,
        "min_rows": training.steps * training.batch_size,
        "max_rounds": training.rounds,
        "min_sites": len(plan.chosen(1)),
    }


def spending(plan: Plan) -> privacy.PrivacySpent | None:
    """What the whole run costs every site; None where it has no noise."""
    training, sites = plan.run.training, len(plan.sites)
    how = privacy.mechanism(plan.run, METHODS[plan.method], sites, (training.seed,))
    return privacy.spent(plan.run, how, sites, training.seed, training.rounds)


def refusal(plan: Plan, limit: str, allows: float | None = None) -> str:
    """The line about a broken limit, for the site's log and, from the same two values, for the lead."""
    values, is_ = asked(plan), f"its policy's {limit} is {allows:g}" if allows is not None else ""
    match limit:
        case "approve":
            return "a person there must approve the run first (`pf2lora federation approve` at the site)"
        case "masked":
            return "its policy allows masked runs alone (--masked)"
        case "models":
            return "its policy does not allow its base model"
        case "sites":
            return "its policy does not allow all of the run's sites"
        case "tasks":
            return f"its policy does not allow the task {plan.run.task.name!r}"
        case "methods":
            return f"its policy does not allow the method {plan.method!r}"
        case _ if not is_:
            return f"its policy refuses the run ({limit})"
        case "max_runs":
            return f"{is_}, and it has taken part in so many runs"
        case "max_repeats":
            return f"{is_}, and the run has asked it to train so often beyond its rounds"
        case "max_plan_days":
            return f"{is_}, and the run's plan was signed longer ago: submit it again"
        case "max_epsilon":
            cost = spending(plan)
            return f"{is_}, and the run has {'no differential privacy' if cost is None else cost.sentence()}"
        case "max_delta":
            return f"{is_}, and the run's δ is {plan.run.privacy.dp_delta:g}"
        case "min_rows" if allows is not None and values["min_rows"] >= allows:
            return f"{is_}, and it has fewer training rows"
    what = {
        "min_batch_size": "smallest batch",
        "min_steps": "steps a round",
        "min_rows": "steps × batch_size",
        "max_rounds": "rounds",
        "min_sites": "sites a round",
    }
    return (
        f"{is_}, and the run's {what[limit]} {'are' if limit != 'min_batch_size' else 'is'} {values[limit]}"
    )
