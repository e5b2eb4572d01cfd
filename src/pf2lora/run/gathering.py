"""What every process has of its own clients, as what all have: scores, losses, choices, adapters."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pf2lora.core.method import Method
from pf2lora.run import costs
from pf2lora.run.deploy import Deployment
from pf2lora.run.evaluation import Measured, Models, measure
from pf2lora.run.result import Choice
from pf2lora.run.set_up import Trial
from pf2lora.tasks.base import Example


def measure_all(trial: Trial, models: Models, *, final: bool = False) -> Measured:
    """Every learner of the run on its client's test data, each by the process that has it."""
    share = trial.share
    with share.processes.together():
        found = measure(trial, models, final=final)
    if share.processes.alone:
        return found
    share_notes(trial)
    drawn = [None if values is None else values.tolist() for values in found.resampled]
    told = share.processes.gather([found.scores, found.examples, drawn, found.confusion])

    def everyones(part: int) -> list[Any]:
        return share.in_order([of_process[part] for of_process in told])

    examples = ([Example(p, tuple(r), o, *at) for p, r, o, *at in client] for client in everyones(1))
    return Measured(
        {metric: share.in_order([of_process[0][metric] for of_process in told]) for metric in found.scores},
        list(examples),
        [None if values is None else np.array(values) for values in everyones(2)] if drawn else [],
        everyones(3) if found.confusion else [],
    )


def share_notes(trial: Trial) -> None:
    """What the task has to say of any process's rows is everybody's to know."""
    for lines in trial.share.processes.gather(trial.workload.task.notes):
        for line in lines:
            trial.workload.task.note(line)


def all_choices(trial: Trial, deployment: Deployment) -> list[Choice]:
    """What every learner of the run deploys."""
    if trial.share.processes.alone:
        return deployment.choices()
    told = trial.share.everyone([asdict(choice) for choice in deployment.choices()])
    return [Choice(**choice) for choice in told]


def rows_at_first(trial: Trial, own: Tensor) -> Tensor:
    """Every client's row, in the first process; this one's in the others, who need no more."""
    share = trial.share
    if share.processes.alone:
        return own
    parts = [share.processes.to_first(rank, own) for rank in range(share.processes.size)]
    if not share.processes.first:
        return own
    return torch.stack(share.in_order([list(part.cpu()) for part in parts if part is not None]))


def largest(trial: Trial, value: int | None) -> int | None:
    """The largest of the processes' figures; None where one has none."""
    told = trial.share.processes.gather(value)
    return None if None in told else max(told)


# --- operations --------------------------------------------------------------------------------------------


def all_steps(trial: Trial, ledger: costs.StepLedger) -> costs.StepLedger:
    """The client-steps of all processes."""
    if trial.share.processes.alone:
        return ledger
    found = costs.StepLedger()
    for part in trial.share.processes.gather(steps_to_json(trial, ledger)):
        for method, done_with in steps_from_json(trial, part).items():
            lengths = found.steps.setdefault(method, {})
            for key, times in done_with.items():
                lengths[key] = lengths.get(key, 0) + times
    return found


def steps_to_json(trial: Trial, ledger: costs.StepLedger) -> Any:
    """What each variant of the method has changed, and its client-steps by the lengths of their batches."""
    return [
        [changed(trial, method), [[list(lengths), times] for lengths, times in done_with.items()]]
        for method, done_with in ledger.steps.items()
    ]


def steps_from_json(trial: Trial, said: Any) -> dict[Method, dict[tuple[int, ...], int]]:
    found = {}
    for fields_changed, done_with in said:
        method = replace(trial.method, **fields_changed) if fields_changed else trial.method
        found[method] = {tuple(lengths): times for lengths, times in done_with}
    return found


def changed(trial: Trial, method: Any) -> dict[str, Any]:
    """What a variant of the trial's method has changed: its fields that are not the method's own."""
    pairs = ((f.name, getattr(method, f.name)) for f in fields(method))
    return {name: value for name, value in pairs if value != getattr(trial.method, name)}
