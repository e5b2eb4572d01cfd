"""What a run says of its rows and of its own choices before it trains."""

from __future__ import annotations

from pf2lora.core.rates import AUTO
from pf2lora.methods import METHODS
from pf2lora.methods.own_size import FIXED
from pf2lora.run.cadence import rounds_to_evaluate
from pf2lora.run.rounds import never_stops
from pf2lora.run.set_up import first_rates, method_settings
from pf2lora.run.workload import Workload


def of_rows(workload: Workload) -> list[str]:
    """What reader and task have to say of the rows, and that there are none to choose by; a task has more to say once
    they are in batches."""
    return [*workload.notes, *without_validation(workload), *workload.task.notes]


def chosen_rate(workload: Workload) -> list[str]:
    """One line where `lr` is left to the model."""
    asked = workload.config.training.method
    left_open = [name for name in asked if method_settings(workload.config, name)["lr"] == AUTO]
    if not left_open:
        return []
    found = first_rates(workload, left_open)
    first, *others = dict.fromkeys(f"{rate:.3g}" for rate in found.values())
    names = (
        f"{other} for {', '.join(METHODS[name].label for name, rate in found.items() if f'{rate:.3g}' == other)}"
        for other in others
    )
    return [", ".join([f"--lr auto is {first} on this model", *names])]


def endless_patience(workload: Workload) -> list[str]:
    """One line where early stopping is asked for and cannot happen."""
    return never_stops(workload.config.training, rounds_to_evaluate(workload))


def without_validation(workload: Workload) -> list[str]:
    """One line where there are no validation rows: what is then not chosen by them."""
    if workload.validation is not None:
        return []
    asked = workload.config.training.method
    line = "no validation rows: what is served after the last round is deployed"
    if any(method_settings(workload.config, name).get("client_lr") == AUTO for name in asked):
        line += f", and --client-lr auto is {FIXED:g}"
    return [line]
