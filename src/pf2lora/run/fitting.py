"""What the device's memory asks of a run, measured once before it begins: layers that are run again for the gradient
(`--checkpointing auto`), how many clients share a pass (`--clients-per-pass auto`), and how many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pf2lora.core.method import moved, take, tensors_of
from pf2lora.core.randomness import participants
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.engines.recorded_answers import RecordedAnswers
from pf2lora.engines.room import attempt, free_memory
from pf2lora.engines.stepper import PlainStepper
from pf2lora.run.set_up import Trial

# Of the memory that is there: recordings and their shapes take some, and what is free is in pieces.
MARGIN = 0.9
# Tokens in a pass, from which on further ones make it no faster by the token.
SATURATED = 4096
# Tokens in a pass of answers: with fewer, a small model's kernels are done before others are launched.
ANSWERED = 2**17
# Of the memory: recorded answers keep a pass's for themselves.
SPARE = 1 / 8
# Of all learners' states at a round's end: before the average, as served, and as they are measured.
COPIES = 3

Peak = Callable[[Trial, int], int | None]
"""The bytes in use at most in a pass of so many clients; None: more than there are."""


def fitted(trial: Trial) -> tuple[Trial, str]:
    """The trial with the room that the device has for it, and a line on what that is where it is not what would be
    fastest."""
    device = trial.workload.device
    if device.type != "cuda":
        return trial, ""
    with trial.model.uncompiled():  # which takes more memory if anything, and no compiling
        memory = MARGIN * memory_of(device)
        said = chosen(trial, peak_of_step, memory)
        fit_answers(trial, peak_of_answers, memory)
        fit_texts(trial, memory)
        record_answers(trial, peak_of_answers, SPARE * memory)
    free_memory()
    return trial, said


def fitted_to_answer(trial: Trial) -> Trial:
    """The trial with room for answers alone, of which nothing is trained."""
    device = trial.workload.device
    if device.type == "cuda":
        fit_answers(trial, peak_of_answers, MARGIN * memory_of(device))
        free_memory()
    return trial


# --- training ----------------------------------------------------------------------------------------------


def chosen(trial: Trial, peak: Peak, memory: float) -> str:
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
    if most < asked or (trial.room.clients is None and not all_stay(trial, peak, memory, asked)):
        trial.room.clients = most
    return f"to fit into the device's memory, {' and '.join(said)}" if said else ""


def all_stay(trial: Trial, peak: Peak, memory: float, asked: int) -> bool:
    """Whether all learners can be at home on the device where `asked` of them take part in a round: their states fit
    beside a pass of all of them, as there is at the run's end. Else those who wait do so on the host."""
    learners = len(trial.source.names)
    if asked == learners:
        return True
    states = sum(t.nbytes for t in tensors_of(trial.state))
    return clients_within(trial, peak, memory - COPIES * states, learners) >= learners


def smaller_parts(trial: Trial, peak: Peak, memory: float) -> list[str]:
    """Where not even one client's batch fits: as many of its rows at once as do."""
    rows = begun = trial.room.rows or trial.source.size
    while rows > 1:
        rows //= 2
        trial.room.rows = rows
        found = peak(trial, 1)
        if found is not None and found <= memory:
            break
    if rows == begun:
        return []
    return [f"a batch's rows are computed {rows} at a time (--micro-batch {rows})"]


def clients_asked(trial: Trial) -> int:
    """How many learners train in a round, or as many of them as the user lets share a pass."""
    schedule, clients = trial.schedule, len(trial.source.clients)
    taking_part = sum(len(participants(seed, 1, clients, schedule.participation)) for seed in schedule.seeds)
    return min(taking_part, trial.room.clients or taking_part)


def clients_within(trial: Trial, peak: Peak, memory: float, asked: int) -> int:
    """How many clients' passes fit into the memory, from the peaks of one and of two."""
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

    def step(together: list[int]) -> None:
        # The second one's place is that of the next pass's clients, who come meanwhile.
        part, _next = (moved(take(trial.state, together), device) for _ in range(2))
        rates = trial.rates.outside(trial.method, together, part.x)
        source = trial.source
        batches = [
            longest(source.data, len(together), source.size, keyed=source.keyed)
            for _ in range(trial.method.draws)
        ]
        PlainStepper(trial.F)(trial.method, part, batches, rates)

    return peak_of(step, clients, device)


# --- answers -----------------------------------------------------------------------------------------------


def fit_answers(trial: Trial, peak: Peak, memory: float) -> None:
    """How many clients' rows are answered in a pass, and how many of each: more than the task's number where that makes
    too small a pass, fewer where not one client's fit. Nobody is told: rows are many, and passes of fewer clients are
    as fast."""
    room = trial.workload.task.rooms.answering
    learners = len(trial.seeds) * len(trial.workload.clients)
    asked = min(learners, room.clients or learners)
    rows = trial.workload.task.evaluation_batch
    enough = ANSWERED // (asked * int(trial.workload.test.lengths.max(initial=1)))
    if enough > rows:
        room.rows = enough
        if clients_within(trial, peak, memory, asked) >= asked:
            return
        room.rows = None
    most = clients_within(trial, peak, memory, asked)
    while not most and rows > 1:
        rows //= 2
        room.rows = rows
        most = clients_within(trial, peak, memory, 1)
    if most < asked:
        room.clients = max(1, most)


def record_answers(trial: Trial, peak: Peak, memory: float) -> None:
    """Passes of answers are recorded where the largest takes no more than so much memory beside the base model."""
    room, config = trial.workload.task.rooms.answering, trial.workload.config
    asked = len(trial.seeds) * len(trial.workload.clients)
    held = torch.cuda.memory_allocated(trial.workload.device)
    if config.model.graphs and clients_within(trial, peak, held + memory, asked) >= asked:
        room.recorder = RecordedAnswers()
        room.holders.add(room.recorder)


def fit_texts(trial: Trial, memory: float) -> None:
    """How many prompts are continued in a pass, of how many clients; counted, as writing takes long to be measured."""
    workload = trial.workload
    free = memory - torch.cuda.memory_allocated(workload.device)
    workload.task.make_room_to_write(trial.model, workload.test, free)


def peak_of_answers(trial: Trial, clients: int) -> int | None:
    """Measured: the losses of the longest test row there is."""
    workload, task = trial.workload, trial.workload.task

    @torch.no_grad()
    def answer(together: list[int]) -> None:
        first = [0] * len(together)  # a pooled learner's is everybody's
        x, y = (t[first].to(workload.device) for t in (trial.state.x, trial.state.y))
        rows = task.rooms.answering.rows or task.evaluation_batch
        task.example_losses(trial.model, x, y, longest(densest(workload.test), len(together), rows))

    return peak_of(answer, clients, workload.device)


# --- measuring ---------------------------------------------------------------------------------------------


def peak_of(run: Callable[[list[int]], None], clients: int, device: torch.device) -> int | None:
    """The bytes in use at most while it runs."""
    torch.cuda.reset_peak_memory_stats(device)
    if attempt(run, list(range(clients))) is None:
        free_memory()  # of what was tried; else nothing is left over, and looking for it takes longer than the pass
        return None
    return int(torch.cuda.max_memory_allocated(device))


def longest(data: Encoded, clients: int, rows: int, *, keyed: bool = False) -> Batch:
    """A batch of the longest row alone."""
    index = np.repeat(np.argmax(data.lengths), clients * rows)
    length = data.length(index)
    key = torch.zeros(clients, dtype=torch.int64, device=data.device) if keyed else None
    bounds = data.most_targets(index, length), data.most_in_row(index, length)
    return Batch(clients, data.rows(index, length), key, False, *bounds)


def densest(data: Encoded) -> Encoded:
    """As if of every row as large a part were predicted as of any: a pass of short rows has as many tokens as one of
    long rows, and may predict more of them."""
    if data.targets is None:
        return data
    lengths = np.maximum(data.lengths, 1)
    return replace(data, targets=np.ceil((data.targets / lengths).max(initial=0) * lengths).astype(int))


def memory_of(device: torch.device) -> float:
    """The bytes that this process may have: what is free, and what it has already."""
    free_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))
