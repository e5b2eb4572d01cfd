"""All clients in one process, as many in one pass as memory allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.choice import Judges
from pf2lora.core.method import (
    Loss,
    Method,
    State,
    StepStats,
    Updates,
    over_tensors,
    put,
    take,
)
from pf2lora.core.privacy import Mechanism
from pf2lora.core.randomness import participants
from pf2lora.core.rates import CONSTANT, RateSchedule
from pf2lora.engines.bad_clients import UpdateLedger, check_enough, without
from pf2lora.engines.batches import BatchSource
from pf2lora.engines.private import common_start, noisy
from pf2lora.engines.rates import Rates
from pf2lora.engines.room import Room
from pf2lora.engines.share import Share, at_server, copy_first, of_everyone
from pf2lora.engines.stepper import Stepper, make_stepper
from pf2lora.engines.steps import LocalTraining, OnStep, Trained, ignore
from pf2lora.engines.stopwatch import Stopwatch
from pf2lora.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """`rounds` rounds of `steps` local steps (T = rounds · steps), then one average of x.

    `participation` is the seeded fraction of clients per round, `weighting` averages "uniform" or by "size" of the
    training data, `clients_per_pass` bounds memory and changes no number. A run with several `seeds` is as many
    federations of the same clients side by side, which share passes and nothing else. `max_bad` clients may be left
    out of a federation's round as bad ones (None: half of its participants); `compare_updates` off, nobody is judged
    by the others' updates. `privacy` puts noise on the averages. `rates` change over the run's steps; where `own_rates`
    are given, one table for each of `seeds`, the federations differ by these numbers of their method, too. `alone` is
    what rates are multiplied by in steps of each client alone after the last round.
    """

    rounds: int
    steps: int = 10
    participation: float = 1.0
    weighting: str = "uniform"
    clients_per_pass: int | None = None
    seeds: tuple[int, ...] = (0,)
    max_bad: int | None = None
    compare_updates: bool = True
    privacy: Mechanism | None = None
    rates: RateSchedule = CONSTANT
    own_rates: tuple[Mapping[str, float], ...] = ()
    alone: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.participation <= 1:
            raise UserError(
                f"participation is {self.participation}; it is a fraction of the clients in (0, 1]"
            )
        if self.weighting not in ("uniform", "size"):
            raise UserError(f"weighting is {self.weighting!r}; it must be 'uniform' or 'size'")
        if self.clients_per_pass is not None and self.clients_per_pass < 1:
            raise UserError(f"clients_per_pass is {self.clients_per_pass}; it must be at least 1")

    def rates_of(self, clients: int) -> Rates:
        """The rates of all learners, of whom each seed has `clients`."""
        return Rates(self.rates, self.rounds, self.steps, clients, self.own_rates, self.alone)


class After(NamedTuple):
    """Where a run stands after a round, beside its learners' states: `train` goes on from there as an unbroken one.
    Batches, dropout and participation follow from seeds and numbers, so nothing of them is kept."""

    number: int = 0  # the round
    steps_done: tuple[int, ...] = ()  # by each learner; empty: none yet
    largest: tuple[float, ...] = ()  # each learner's largest update (`UpdateLedger`); empty: none yet
    servers: tuple[
        Any, ...
    ] = ()  # what each seed's server keeps, (nested tuples of) tensors; empty: nothing yet


class Round(NamedTuple):
    """What a round did, for all learners (the clients of every seed, seed by seed). `before` has x and y after the
    local steps, `served` the state after the average came back. Who was `left_out` as a bad client is no participant.

    Both are the engine's own, which the next round writes over (a thousand clients' states are not copied for
    nothing); who needs them longer asks for `kept()`.
    """

    number: int  # from 1
    participants: list[int]
    stats: StepStats  # (steps, K) for the K learners that took part
    before: State
    served: State
    common: Tensor  # (seeds, n) the servers' answers, or (seeds, clients, n) where they differ by client
    seconds: float
    left_out: Mapping[int, str] = MappingProxyType({})  # with the reason
    after: After = After()
    resize_seconds: float = 0.0  # in which validation rows were asked before the steps; not among `seconds`

    def kept(self) -> Round:
        """This round with states of its own."""
        before, served = (over_tensors(torch.clone, state) for state in (self.before, self.served))
        return self._replace(before=before, served=served)


def merge_weights(sizes: Sequence[int], weighting: str) -> Tensor:
    """The server's weights of the clients that took part; they sum to one."""
    weights = torch.tensor(sizes if weighting == "size" else [1] * len(sizes), dtype=torch.float64)
    return weights / weights.sum()


def train(
    method: Method,
    F: Loss,
    state: State,
    source: BatchSource,
    schedule: Schedule,
    *,
    device: torch.device | str = "cpu",
    on_step: OnStep = ignore,
    stepper: Stepper | None = None,
    judges: Judges | None = None,
    after: After | None = None,
    share: Share | None = None,
    room: Room | None = None,
) -> Iterator[Round]:
    """The rounds of a run, one by one. This loop exists once.

    `state` and `source` are those of all learners: the clients of the first of the schedule's seeds, then of the next.
    A local step is run by the `stepper`; without one, on a CUDA device, it is recorded as a CUDA graph and replayed.
    `judges` gives some learners' judge, where there are validation rows. `after` a round that was done before, the run
    goes on with the next: `state` is what was served then. Where processes `share` the clients, `state`, `source` and
    `judges` are those of this one's learners, and a round's numbers, but for the states, are everybody's. `room` says
    how many share a pass where it is known better than the schedule knows it.
    """
    seeds, share = schedule.seeds, share or Share.of_one(len(source.names) // len(schedule.seeds))
    names, sizes = share.everyone(source.names), share.everyone(source.sizes)
    if not names or min(sizes) == 0:
        raise UserError("a run needs at least one client, and every client at least one training row")
    here, after = share.learners(len(seeds)), after or After()
    room = room or Room(schedule.clients_per_pass)
    compare = schedule.compare_updates
    ledger = UpdateLedger(len(names), share.clients, compare=compare, largest=after.largest, numbers=here)
    first = state
    home = home_of(len(here), room, torch.device(device))
    state = over_tensors(lambda t: own_copy(t, home, waits_for=torch.device(device)), state)
    served = state
    stepper, resizing = stepper or make_stepper(F, device), Stopwatch(torch.device(device))
    room.holders.add(stepper)
    local = LocalTraining(
        method,
        F,
        source,
        steps=schedule.steps,
        room=room,
        rates=schedule.rates_of(len(share.here)),
        device=device,
        stepper=stepper,
        on_step=on_step,
        judges=judges,
        resizing=resizing,
    )
    steps_done = list(after.steps_done) or [0] * len(names)
    servers = over_tensors(lambda t: t.to(home), after.servers)
    servers = servers or tuple(method.first_server(state.x[:0, 0]) for _ in seeds)
    for number in range(after.number + 1, schedule.rounds + 1):
        started, resizing.seconds = time.perf_counter(), 0.0
        over_tensors(lambda own, new: own if own is new else own.copy_(new), state, served)
        asked = federations_of(schedule, share, number)
        starts = starts_of(method, state, asked, share, number) if schedule.privacy else []
        trained = trained_by_all(local, state, asked, share, steps_done, ledger, number)
        for i in joined_up(asked):
            steps_done[i] += schedule.steps
        if late := ledger.close():  # in a federation's first round: nobody has moved yet
            put(state, share.places(late), take(first, share.places(late)))
            trained.bad.update(late)
        check_enough(trained.bad, asked, names, number, schedule.max_bad)
        federations = list(without(asked, trained.bad))
        chosen = joined_up(federations)
        mine = share.places(chosen)
        leaving = take(state, mine)
        stays, sent = method.send(leaving, number)
        updates = by_server(sent, federations, share, sizes, schedule.weighting, number)
        updates = protected(schedule, method, updates, starts, [len(f) for f in asked], share)
        common, servers = merged(method, updates, servers, share)
        served = state
        if stays is not leaving:  # what a method prunes as it sends is not part of `before`
            served = over_tensors(torch.clone, state)
            put(served, mine, stays)
        served = method.receive(served, to_learners(common, share), number)
        stats = trained.of(chosen)
        yield Round(
            number,
            participants=chosen,
            stats=stats,
            before=state,
            served=served,
            common=common,
            seconds=time.perf_counter() - started - resizing.seconds,
            left_out=dict(sorted(trained.bad.items())),
            after=After(number, tuple(steps_done), tuple(ledger.largest), servers),
            resize_seconds=resizing.seconds,
        )


def federations_of(schedule: Schedule, share: Share, number: int) -> list[list[int]]:
    """The learners that take part in round `number`, seed by seed."""
    clients = share.clients
    return [
        [s * clients + k for k in participants(seed, number, clients, schedule.participation)]
        for s, seed in enumerate(schedule.seeds)
    ]


def joined_up(federations: Sequence[Sequence[int]]) -> list[int]:
    """The learners of all of them."""
    return [i for federation in federations for i in federation]


def starts_of(
    method: Method, state: State, federations: Sequence[Sequence[int]], share: Share, number: int
) -> list[Tensor]:
    """Where each federation's participants begin, which noise is put on the change from."""
    return [
        common_start(method, take(state, share.places(federation) or [share.own(s).start]), number)
        for s, federation in enumerate(federations)
    ]


def trained_by_all(
    local: LocalTraining,
    state: State,
    federations: Sequence[Sequence[int]],
    share: Share,
    steps_done: Sequence[int],
    ledger: UpdateLedger,
    number: int,
) -> Trained:
    """The local steps of round `number`, written over `state`, and what those of all processes tell."""
    with share.processes.together():
        training = share.places(joined_up(federations)) if share.trains else []
        here = share.learners(len(federations))
        trained = local.round(number, state, training, [steps_done[i] for i in here], ledger)
    trained = of_everyone(share, trained, ledger, state.x)
    copy_first(share, state)
    return trained


def protected(
    schedule: Schedule,
    method: Method,
    updates: Sequence[Updates],
    starts: Sequence[Tensor],
    expected: Sequence[int],
    share: Share,
) -> list[Updates]:
    """What each server gets of all processes: with noise, by the number of participants that were `expected`, where the
    run is private."""
    if schedule.privacy is None:
        return [at_server(share, method, own) for own in updates]
    return [
        noisy(schedule.privacy, own, start, count, seed, share.processes)
        for own, start, count, seed in zip(updates, starts, expected, schedule.seeds)
    ]


def merged(
    method: Method, updates: Sequence[Updates], servers: Sequence[Any], share: Share
) -> tuple[Tensor, tuple[Any, ...]]:
    """The servers' answers, and what they keep."""
    answers, servers = zip(*(method.merge(own, server) for own, server in zip(updates, servers)))
    common = torch.stack(answers)
    if method.needs_rows:  # the same bits for all, whatever a decomposition gives on each machine
        share.processes.copy_first(common)
    return common, tuple(servers)


def home_of(learners: int, room: Room, device: torch.device) -> torch.device:
    """Where the learners' states are between their passes: on the device where all of them fit into one, else on the
    host. Where few take part in a round, so few are what there is room for, however many wait."""
    return device if room.clients is None or room.clients >= learners else torch.device("cpu")


def own_copy(tensor: Tensor, home: torch.device, waits_for: torch.device) -> Tensor:
    """A copy at home; where that is the host of a CUDA device, in memory that the device reads by itself: clients come
    to it at several times the speed, while the host goes on."""
    copied = tensor.to(home, copy=True)
    return copied.pin_memory() if home.type == "cpu" and waits_for.type == "cuda" else copied


def by_server(
    sent: Tensor,
    federations: Sequence[Sequence[int]],
    share: Share,
    sizes: Sequence[int],
    weighting: str,
    number: int,
) -> list[Updates]:
    """What each federation's server gets from this process: of all participants, whom `clients` names, the rows that
    are here; `sent` has them, federation by federation."""
    found, start, here = [], 0, set(share.here)
    for s, federation in enumerate(federations):
        weights = merge_weights([sizes[i] for i in federation], weighting).to(sent.device)
        positions = tuple(i - s * share.clients for i in federation)
        own = [column for column, k in enumerate(positions) if k in here]
        rows = sent[start : start + len(own)]
        found.append(Updates(rows, weights[own], positions, number))
        start += len(own)
    return found


def to_learners(common: Tensor, share: Share) -> Tensor:
    """The answer of its server for each learner that is here `(learners, n)`: a view where there is one server with one
    answer."""
    if common.dim() == 2:
        common = common.unsqueeze(1).expand(-1, len(share.here), -1)
    elif not share.processes.alone:
        common = common[:, list(share.here)]
    return common.flatten(0, 1)
