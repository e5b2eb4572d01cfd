"""A local step in the plain way and in this project's, from the same start: their losses and their times.

`step_time.py` says what the plain way is, and goes through models, precisions and numbers of clients.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from plain_peft import PlainClient, PlainLoop
from shapes import CLIENT_LR, Workload, batches_of, necessary_flops, start
from timing import float32_products, milliseconds, peak_gb, start_memory
from torch import Tensor

from pf2lora.core.method import State, StepStats
from pf2lora.engines.batches import Batch
from pf2lora.engines.stepper import make_stepper
from pf2lora.run.config import TrainingSettings
from pf2lora.run.set_up import Trial

RATES = TrainingSettings()  # the package's own, on both sides
CHECKED_CLIENTS, CHECKED_STEPS = 2, 3
HYPERGRADIENTS = ("difference", "exact", "none")
Step = Callable[..., tuple[State, StepStats]]


class Way(NamedTuple):
    """A method and how it gets its hypergradient; HOMLoRA has none."""

    method: str
    hypergradient_mode: str | None

    @property
    def two_level(self) -> bool:
        return self.method == "pf2lora"

    @property
    def plain(self) -> Way:
        """What the plain way does for it: nobody would write `difference` by hand."""
        return Way(self.method, "exact") if self.hypergradient_mode == "difference" else self


class Timed(NamedTuple):
    ms: float  # ours: of all clients; plain: of one
    peak: float | None
    clients: int  # in one pass, or timed one by one
    flops: float = 0.0  # necessary, of all clients


def set_up(work: Workload, way: Way, clients: int, **settings: Any) -> Trial:
    """The package's set-up of the way's method."""
    mode = {"hypergradient_mode": way.hypergradient_mode} if way.two_level else {}
    return work.set_up(way.method, clients, **mode, **settings)


def our_step(trial: Trial) -> Step:
    """This project's step, `(state, *batches) -> (state, report)`."""
    stepper = make_stepper(trial.F, trial.workload.device)
    return lambda state, *batches: stepper(trial.method, state, batches)


def plain_clients(
    work: Workload, way: Way, count: int, *, masked: bool = False
) -> tuple[PlainLoop, list[PlainClient], int]:
    """The PEFT loop on the attention that the way needs, its first clients, and how many batches a step draws."""
    trial = set_up(work, way, count)
    state = start(trial)
    loop = PlainLoop(
        trial.model,
        lr=trial.method.lr,
        client_lr=CLIENT_LR,
        weight_decay=RATES.weight_decay,
        masked=masked,
    )
    work.base.set_attn_implementation("eager" if way.hypergradient_mode == "exact" else "sdpa")
    return loop, [loop.client(state.x[k], state.y[k]) for k in range(count)], trial.method.draws


def end_plain(work: Workload, loop: PlainLoop) -> None:
    loop.remove()
    work.base.set_attn_implementation("sdpa")


def plain_step(loop: PlainLoop, way: Way, client: PlainClient) -> Callable[..., Tensor]:
    """The client's step, `(*batches) -> loss`, with its parameters in place."""
    loop.turn_of(client)
    if not way.two_level:
        return lambda batch: loop.homlora(client, batch)
    second_order = way.hypergradient_mode != "none"
    return lambda inner, outer: loop.pf2lora(client, inner, outer, second_order=second_order)


def plain_batches(
    work: Workload, client: int, step: int, draws: int, *, by_length: bool
) -> list[dict[str, Tensor]]:
    """The client's rows padded to its own longest; in shuffled order unless `by_length`."""
    source = work.plain_source(by_length=by_length)
    return [batch.tensors for batch in batches_of(source, [client], step, draws)]


def plain_losses(work: Workload, way: Way) -> Tensor:
    """The losses (steps, clients) of the plain way's first steps."""
    loop, clients, draws = plain_clients(work, way, CHECKED_CLIENTS, masked=True)
    losses = []
    for k, client in enumerate(clients):
        step = plain_step(loop, way, client)
        same = [plain_batches(work, k, i, draws, by_length=work.shape.varied) for i in range(CHECKED_STEPS)]
        of_client = [step(*batches) for batches in same]
        losses.append(torch.stack(of_client))
    end_plain(work, loop)
    return torch.stack(losses, dim=1)


def our_losses(work: Workload, way: Way) -> Tensor:
    """The losses (steps, clients) of this project's first steps."""
    trial = set_up(work, way, CHECKED_CLIENTS)
    state, step = start(trial), our_step(trial)
    losses = []
    for i in range(CHECKED_STEPS):
        batches = batches_of(trial.source, range(CHECKED_CLIENTS), i, trial.method.draws)
        state, report = step(state, *batches)
        losses.append(report.loss.clone())
    trial.model.remove()
    return torch.stack(losses)


def loss_differences(work: Workload, ways: list[Way]) -> dict[Way, float]:
    """The largest difference of a loss between the plain way and this project, from the same start, in float32."""
    with float32_products("highest"):
        plain = {way: plain_losses(work, way) for way in dict.fromkeys(way.plain for way in ways)}
        return {way: float((plain[way.plain] - our_losses(work, way)).abs().max()) for way in ways}


def time_plain(work: Workload, way: Way, count: int, options: argparse.Namespace) -> Timed:
    """The plain way's step of one client, the mean of `count`; putting parameters in place is not counted."""
    start_memory(work.device)
    loop, clients, draws = plain_clients(work, way, count)
    by_length = options.same_batches and work.shape.varied

    def of_client(k: int) -> float:
        step = plain_step(loop, way, clients[k])
        sets = [plain_batches(work, k, i, draws, by_length=by_length) for i in range(options.sets)]
        run = lambda: [step(*batches) for batches in sets]  # noqa: E731
        whole = milliseconds(run, work.device, options.repeat, warm_up=lambda: step(*sets[0]))
        return whole / len(sets)

    try:
        ms = statistics.mean(of_client(k) for k in range(count))
        return Timed(ms, peak_gb(work.device), count)
    finally:
        end_plain(work, loop)


def time_ours(work: Workload, way: Way, clients: int, options: argparse.Namespace) -> Timed:
    """This project's step of `clients` in one pass."""
    start_memory(work.device)
    if options.compile:
        torch.compiler.reset()
    trial = set_up(work, way, clients, compile=options.compile)
    try:
        state, step = start(trial), our_step(trial)
        sets = [batches_of(trial.source, range(clients), i, trial.method.draws) for i in range(options.sets)]

        def run(batches_of_steps: list[list[Batch]] = sets) -> None:
            nonlocal state
            for batches in batches_of_steps:
                state, _ = step(state, *batches)

        warm_up = None if work.device.type == "cuda" else lambda: run(sets[:1])
        ms = milliseconds(run, work.device, options.repeat, warm_up=warm_up) / len(sets)
        flops = necessary_flops(trial.model, [b for batches in sets for b in batches], way.hypergradient_mode)
        return Timed(ms, peak_gb(work.device), clients, flops)
    finally:
        trial.model.remove()


def time_passes(work: Workload, way: Way, clients: int, options: argparse.Namespace) -> Timed:
    """All clients in one pass if they fit into memory, else in equal passes (`clients_per_pass`), one of them timed."""
    per_pass = min(clients, options.clients_per_pass or clients)
    while True:
        try:
            timed = time_ours(work, way, per_pass, options)
            passes = clients / per_pass
            return timed._replace(ms=timed.ms * passes, flops=timed.flops * passes)
        except torch.OutOfMemoryError:
            if per_pass == 1:
                raise
        per_pass //= 2
