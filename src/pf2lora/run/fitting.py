"""What the device's memory asks of a run, measured once before it begins: layers that are run again for the gradient
(`--checkpointing auto`), how many clients share a pass (`--clients-per-pass auto`), and how many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pf2lora.core.method import moved, take
from pf2lora.core.randomness import participants
from pf2lora.engines.batches import Batch
from pf2lora.engines.room import attempt, free_memory
from pf2lora.engines.stepper import PlainStepper
from pf2lora.run.set_up import Trial

MARGIN = (
    0.9  # of the memory that is there: recordings and their shapes take some, and what is free is in pieces
)
SATURATED = 4096  # tokens in a pass, from which on further ones make it no faster by the token

Peak = Callable[[Trial, int], int | None]
"""The bytes in use at most in a step of so many clients; None: more than there are."""


def fitted(trial: Trial) -> tuple[Trial, str]:
    """The trial as the device holds it, and a line on what that is where it is not what would be fastest."""
    device = trial.workload.device
    if device.type != "cuda":
        return trial, ""
    with trial.model.uncompiled():  # which takes more memory if anything, and no compiling
        found = chosen(trial, peak_of_step, MARGIN * memory_of(device))
    free_memory()
    return found


def chosen(trial: Trial, peak: Peak, memory: float) -> tuple[Trial, str]:
    """Whether layers are run again, and who shares a pass. Passes of fewer clients come first, which cost nothing while
    they are large enough to keep the device busy; then layers that are run again, then still fewer clients."""
    model, asked = trial.model, clients_asked(trial)
    ways = {"on": [True], "off": [False], "auto": [False, True]}[trial.workload.config.model.checkpointing]
    for again in ways:
        model.repeat_layers(again)
        most = clients_within(trial, peak, memory, asked)
        enough = most >= min(asked, -(-SATURATED // tokens(trial)))
        if most >= asked or (enough and most) or again is ways[-1]:
            break
    said = [] if most else smaller_parts(trial, peak, memory)
    most = max(1, min(most, asked))
    if model.repeats_layers and len(ways) > 1:
        said.append("layers are run again for the gradient (--checkpointing on)")
    if most < asked:
        said.append(f"{most} of {asked} clients share a pass (--clients-per-pass {most})")
        trial = replace(trial, schedule=replace(trial.schedule, clients_per_pass=most))
        trial.workload.task.clients_per_pass = most
    return trial, f"to fit into the device's memory, {' and '.join(said)}" if said else ""


def smaller_parts(trial: Trial, peak: Peak, memory: float) -> list[str]:
    """Where not even one client's batch fits: as many of its rows at once as do."""
    task, rows = trial.workload.task, trial.workload.task.micro_batch or trial.source.size
    while rows > 1:
        rows //= 2
        task.micro_batch = rows
        found = peak(trial, 1)
        if found is not None and found <= memory:
            break
    if rows == trial.source.size:
        return []
    return [f"a batch's rows are computed {rows} at a time (--micro-batch {rows})"]


def clients_asked(trial: Trial) -> int:
    """How many learners train in a round, or as many of them as the user lets share a pass."""
    schedule, clients = trial.schedule, len(trial.source.clients)
    taking_part = sum(len(participants(seed, 1, clients, schedule.participation)) for seed in schedule.seeds)
    return min(taking_part, schedule.clients_per_pass or taking_part)


def clients_within(trial: Trial, peak: Peak, memory: float, asked: int) -> int:
    """How many clients' steps fit into the memory, from the peaks of one and of two."""
    one = peak(trial, 1)
    if one is None or one > memory:
        return 0
    if asked == 1:
        return 1
    two = peak(trial, 2)
    if two is None:
        return 1
    return 1 + int((memory - one) // max(1, two - one))


def tokens(trial: Trial) -> int:
    """What a client adds to a pass at most."""
    return trial.source.size * int(trial.source.data.lengths.max(initial=1))


def peak_of_step(trial: Trial, clients: int) -> int | None:
    """Measured: one step of the first clients on the longest row there is."""
    device = trial.workload.device
    free_memory()
    torch.cuda.reset_peak_memory_stats(device)

    def run(together: list[int]) -> None:
        part = moved(take(trial.state, together), device)
        rates = trial.rates.outside(trial.method, together, part.x)
        batches = [longest(trial, len(together)) for _ in range(trial.method.draws)]
        PlainStepper(trial.F)(trial.method, part, batches, rates)

    if attempt(run, list(range(clients))) is None:
        return None
    return int(torch.cuda.max_memory_allocated(device))


def longest(trial: Trial, clients: int) -> Batch:
    """A batch of the longest row alone."""
    source, data = trial.source, trial.source.data
    index = np.repeat(np.argmax(data.lengths), clients * source.size)
    length = data.length(index)
    key = torch.zeros(clients, dtype=torch.int64, device=data.device) if source.keyed else None
    return Batch(clients, data.rows(index, length), key, targets=data.most_targets(index, length))


def memory_of(device: torch.device) -> float:
    """The bytes that this process may have: what is free, and what it has already."""
    free_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))
