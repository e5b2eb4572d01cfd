"""Which process has which clients of a run: shared out by the tokens that each passes through the model."""

from __future__ import annotations

from dataclasses import replace

from pf2lora.core.method import GRADIENT
from pf2lora.engines.share import Share, shared_out
from pf2lora.run.rounds import evaluation_rounds
from pf2lora.run.workload import Workload


def share_of(workload: Workload) -> Share:
    """The clients of a run over its processes; the same in each of them, and in every run of these settings."""
    processes = workload.processes
    if processes.alone:
        return Share.of_one(len(workload.clients))
    return Share(processes, shared_out(loads(workload), processes.size))


def loads(workload: Workload) -> list[float]:
    """About how many tokens each client passes through the model over the run: in training by how long its rows are
    (every client does as many steps), in evaluation by how many there are."""
    training = workload.config.training
    evaluations = len(evaluation_rounds(training))
    rows = GRADIENT * training.rounds * training.steps * training.batch_size
    found = []
    for k in range(len(workload.clients)):
        trained, *evaluated = (
            part.lengths[part.starts[k] : part.starts[k + 1]]
            for part in (workload.train, workload.test, workload.validation)
            if part is not None
        )
        tokens = rows * trained.mean() + evaluations * sum(lengths.sum() for lengths in evaluated)
        found.append(float(tokens))
    return found


def part_of(workload: Workload, share: Share) -> Workload:
    """The workload of this process's clients; their rows are not copied."""
    if share.processes.alone:
        return workload
    here = share.here
    validation, sample = (
        None if part is None else part.of(here) for part in (workload.validation, workload.validation_sample)
    )
    return replace(
        workload,
        clients=[workload.clients[k] for k in here],
        train=workload.train.of(here),
        test=workload.test.of(here),
        validation=validation,
        validation_sample=sample,
    )
