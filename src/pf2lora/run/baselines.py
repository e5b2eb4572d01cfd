"""What no training gives, to see scores against: the model as it begins, and an answer that looks at no text."""

from __future__ import annotations

import torch

from pf2lora.run.evaluation import Models, summary
from pf2lora.run.fitting import fitted_to_answer
from pf2lora.run.gathering import measure_all
from pf2lora.run.result import Baseline
from pf2lora.run.set_up import set_up
from pf2lora.run.workload import Workload

UNTRAINED, TRIVIAL = "untrained", "trivial"


def baselines(workload: Workload) -> dict[str, Baseline]:
    """Every client's scores at round 0, of the first seed, and those of the task's trivial answer, where it has one."""
    found = {UNTRAINED: untrained(workload)}
    if (without_text := trivial(workload)) is not None:
        found[TRIVIAL] = without_text
    return found


def trivial(workload: Workload) -> Baseline | None:
    """The scores of the task's answer that looks at no text, where every client has one."""
    task = workload.task
    found = [task.trivial(client.train, client.test) for client in workload.clients]
    known = [scores for scores in found if scores is not None]
    if not known or len(known) < len(found):
        return None
    scores = {metric: [of_client.get(metric) for of_client in known] for metric in task.metrics}
    return Baseline(task.trivial_label, summary(task.metrics, scores) or {})


def untrained(workload: Workload) -> Baseline:
    """The model that every method begins with: all adapters add nothing yet, so any method shows it."""
    training = workload.config.training
    trial = fitted_to_answer(set_up(workload, training.method[0], training.seed, compiled=False))
    try:
        clients = len(trial.workload.clients)
        common, personal = (t[:1].expand(clients, -1) for t in (trial.state.x, trial.state.y))
        scores = measure_all(trial, Models(common, torch.zeros_like(personal))).scores
    finally:
        trial.model.remove()
    return Baseline("untrained (round 0)", summary(workload.task.metrics, scores) or {})
