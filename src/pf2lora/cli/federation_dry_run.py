"""`pf2lora federation … --dry-run`: the plan, checked; what is sent; what noise costs. Nothing is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from pf2lora.cli.dry_run import end, planned_run, show_costs
from pf2lora.run import numbers
from pf2lora.run.config import Config

if TYPE_CHECKING:
    from pf2lora.federation.protocol.plan import Plan


def show_rehearsal(config: Config, options: dict[str, Any]) -> None:
    """What `rehearse` would do: as `train --dry-run`, and the plan."""
    from pf2lora.federation.protocol.names import site_names
    from pf2lora.federation.protocol.plan import Plan

    def can_be_planned() -> None:  # as far as is known before the data is read
        Plan.of(config, "rehearsal", ("a", "b", "c"), ("a", "b"), **options)

    planned, workload = planned_run(config, can_be_planned)
    plan = Plan.of(config, "rehearsal", site_names(workload.names), tuple(workload.task.labels), **options)
    (method,) = planned.methods
    show_costs(config, planned.methods, str(workload.device), width(plan))
    show_plan(plan, config, method.sent.total)
    total = method.training_seconds + method.evaluation_seconds
    end(
        f"all of it: about {numbers.duration(round(total))} and the time in which a server and {len(plan.sites)} sites "
        f"start, which share this machine; nothing was started or written",
        planned.warnings,
    )


def show_submission(plan: Plan, config: Config) -> None:
    """What `submit` would hand to the server. The lead sees no data; with a model, what is sent is counted."""
    sent = None
    if config.model.name:
        from pf2lora.cli.show import quiet_libraries
        from pf2lora.run.dry_run import sent_without_data

        quiet_libraries()
        sent = sent_without_data(config, plan.labels, len(plan.sites))
    show_plan(plan, config, sent)
    if sent is None:
        typer.echo("what a site sends follows from the model: --model counts it")
    typer.echo("nothing was submitted")


def width(plan: Plan) -> float:
    """Of a number on the network, against what is counted elsewhere: of a change, after the first round."""
    from pf2lora.federation.protocol.wire import BLOCK, Wire

    return Wire.of(plan).size(BLOCK, change=True) / (4 * BLOCK)


def show_plan(plan: Plan, config: Config, sent: float | None) -> None:
    """The plan in words: who, how long a round may take, what crosses the network, what the noise costs."""
    from pf2lora.methods import METHODS
    from pf2lora.run.cadence import learners_per_round
    from pf2lora.run.privacy import mechanism, spent

    training, kind = config.training, METHODS[plan.method]
    asked = learners_per_round(config, len(plan.sites))
    lines = [
        f"plan {plan.name!r}: {kind.label}, {training.rounds} rounds of {training.steps} steps, "
        f"{len(plan.sites)} sites ({', '.join(plan.sites)})",
        f"a round asks {asked} sites and needs {plan.needed(asked)}; they have {plan.deadline:g} s, and an update "
        f"beyond {plan.norm_limit:g} × the median norm is refused",
    ]
    if plan.labels:
        lines.append(f"agreed on beforehand: {', '.join(plan.labels)}")
    if sent is not None:
        each = sent * width(plan)
        written = "masked" if plan.masked else plan.wire
        lines.append(
            f"a site sends {numbers.size(each)} a round ({written}), all {numbers.size(each * asked)}, in the run "
            f"{numbers.size(each * asked * training.rounds)}; about as much comes back"
        )
    how = mechanism(config, kind, len(plan.sites), [training.seed])
    cost = spent(config, how, len(plan.sites), training.seed, training.rounds)
    lines.append("privacy: no noise (--dp-epsilon)" if cost is None else f"privacy: {cost.sentence()}")
    for line in lines:
        end(line)
