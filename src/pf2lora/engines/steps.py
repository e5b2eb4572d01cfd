"""The local steps of a round: who trains together, step by step, and who turns out to be bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pf2lora.core.choice import Judges
from pf2lora.core.method import Loss, Method, State, StepStats, over_tensors, put, take
from pf2lora.engines.bad_clients import UpdateLedger, change, lost
from pf2lora.engines.batches import BatchSource
from pf2lora.engines.rates import Rates, StepRates
from pf2lora.engines.room import Room
from pf2lora.engines.stepper import NO_RATES, PlainStepper, Stepper
from pf2lora.engines.stopwatch import Stopwatch
from pf2lora.engines.travel import travelling


class Step(NamedTuple):
    """What one local step was: the method, of how many clients, and how long the rows of its batches were."""

    method: Method
    clients: int
    lengths: tuple[int, ...]


OnStep = Callable[[Step], None]


def ignore(step: Step) -> None:
    """Nobody watches."""


def local_steps(
    method: Method,
    F: Loss,
    state: State,
    source: BatchSource,
    *,
    clients: Sequence[int],
    first_step: Sequence[int],
    steps: int,
    on_step: OnStep = ignore,
    stepper: Stepper | None = None,
    rates: Sequence[StepRates] = (),
) -> tuple[State, StepStats]:
    """`steps` local steps of `clients`, whose states are `state`; `first_step` says how many each has done before.
    `rates` has each step's, where they are not the method's numbers.

    A site of a federation calls this with one client, the local engine with as many as it trains at once.
    """
    step = stepper or PlainStepper(F)
    first, collected = state, []
    for i in range(steps):
        batches = [
            source.draw(clients, [(done + i) * method.draws + d for done in first_step])
            for d in range(method.draws)
        ]
        state, stats = step(method, state, batches, rates[i] if rates else NO_RATES)
        collected.append(stats)
        on_step(Step(method, len(clients), tuple(batch.length for batch in batches)))
    losses = torch.stack([r.loss for r in collected])
    losses[-1] = losses[-1].masked_fill(lost(first, state), torch.nan)
    shares = [r.second_order for r in collected if r.second_order is not None]
    return step.keep(state), StepStats(losses, torch.stack(shares) if shares else None)


def variants(
    method: Method, state: State, clients: Sequence[int], number: int
) -> Iterator[tuple[Method, list[int]]]:
    """Who can train together in round `number`: clients who do it with the same method."""
    variants_for_round = method.variants_for_round(state, number)
    for kind in dict.fromkeys(variants_for_round[k] for k in clients):
        yield kind, [k for k in clients if variants_for_round[k] == kind]


@dataclass
class Told:
    """Tells of every step, and takes back those that are undone."""

    on_step: OnStep
    steps: list[Step] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        self.steps.append(step)
        self.on_step(step)

    def undo(self) -> None:
        for step in self.steps:
            self.on_step(step._replace(clients=-step.clients))
        self.steps.clear()


def joined(collected: Sequence[StepStats], order: Sequence[int]) -> StepStats:
    """The stats of several passes as one on the host, clients in `order`; a share that was not computed is nan."""
    losses = torch.cat([r.loss for r in collected], dim=1)[:, list(order)].cpu()
    if all(r.second_order is None for r in collected):
        return StepStats(losses)
    shares = [
        torch.full_like(r.loss, torch.nan) if r.second_order is None else r.second_order for r in collected
    ]
    return StepStats(losses, torch.cat(shares, dim=1)[:, list(order)].cpu())


class Trained(NamedTuple):
    """What a round's local steps tell: the figures of `learners` `(steps, K)`, and why some of them are bad."""

    learners: list[int]
    stats: list[StepStats]  # of each pass
    bad: dict[int, str]

    def of(self, learners: Sequence[int]) -> StepStats:
        """The figures of these learners, on the host."""
        columns = {i: column for column, i in enumerate(self.learners)}
        return joined(self.stats, [columns[i] for i in learners])


@dataclass(frozen=True)
class LocalTraining:
    """What is the same in every round's local steps. `judges` gives some learners' judge, where there are validation
    rows; what is asked of it is no step, and has a watch of its own."""

    method: Method
    F: Loss
    source: BatchSource
    steps: int
    room: Room
    rates: Rates
    device: torch.device | str
    stepper: Stepper
    on_step: OnStep = ignore
    judges: Judges | None = None
    resizing: Stopwatch = field(default_factory=lambda: Stopwatch(torch.device("cpu")))

    def round(
        self,
        number: int,
        state: State,
        learners: Sequence[int],
        steps_done: Sequence[int],
        ledger: UpdateLedger,
    ) -> Trained:
        """The local steps of round `number`; who is bad keeps its place in `state`, the others' new ones are written
        over it."""
        method, trained_so_far = self.method, Trained([], [], {})
        with travelling(state, torch.device(self.device)) as travel:
            for variant, alike in variants(method, state, learners, number):
                told = Told(self.on_step)

                def train(
                    together: list[int],
                    variant: Method = variant,
                    alike: list[int] = alike,
                    told: Told = told,
                ) -> tuple[State, State, StepStats]:
                    told.steps.clear()
                    after = alike.index(together[-1]) + 1
                    part = travel.fetch(together, alike[after : after + len(together)])
                    done = [steps_done[i] for i in together]
                    part = self.resized(part, together, done)
                    rates = self.rates.of_round(variant, together, number, part.x)
                    trained, stats = local_steps(
                        variant,
                        self.F,
                        part,
                        self.source,
                        clients=together,
                        first_step=done,
                        steps=self.steps,
                        on_step=told,
                        stepper=self.stepper,
                        rates=rates,
                    )
                    return part, trained, stats

                def undo(told: Told = told) -> None:
                    told.undo()
                    travel.drop()

                for together, (part, trained, stats) in self.room.passes(alike, train, undo):
                    bad = ledger.judge(together, stats.loss, change(part, trained))
                    good = [column for column, i in enumerate(together) if i not in bad]
                    if good:
                        travel.bring_back([together[column] for column in good], take(trained, good))
                    trained_so_far.learners.extend(together)
                    trained_so_far.stats.append(stats)
                    trained_so_far.bad.update(bad)
                    del part, trained  # the next pass needs their memory
        return trained_so_far

    def resized(self, part: State, together: Sequence[int], steps_done: Sequence[int]) -> State:
        """The learners' states after those of them whose turn it is, by their own steps, have asked their validation
        rows."""
        judges, method = self.judges, self.method
        if judges is None or not method.resizes:
            return part
        due = [
            column
            for column, (i, done) in enumerate(zip(together, steps_done))
            if method.resizes_before(done, self.steps, judges.batches(i))
        ]
        if not due:
            return part
        with self.resizing.running():
            if len(due) == len(together):
                return method.resize(part, judges(together))
            whole = over_tensors(torch.clone, part)
            put(whole, due, method.resize(take(part, due), judges([together[column] for column in due])))
            return whole
