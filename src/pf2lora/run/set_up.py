"""The one way to set a method up, for a local run, a comparison, a newcomer, and a federation's site and server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.layout import NO_LAYOUT, Layout
from pf2lora.core.method import Loss, Method, State, Surroundings
from pf2lora.core.randomness import participants
from pf2lora.core.rates import GivenRate, RateSchedule, alone_factor, rate_in_numbers
from pf2lora.engines.batches import Encoded, EncodedSource
from pf2lora.engines.local import Schedule
from pf2lora.engines.rates import Rates
from pf2lora.engines.room import Room, Rooms
from pf2lora.engines.share import Share
from pf2lora.engines.stepper import Stepper, make_stepper
from pf2lora.methods import METHODS
from pf2lora.run import privacy
from pf2lora.run.compiling import compiles, lengths
from pf2lora.run.config import Config
from pf2lora.run.sharing import part_of, share_of
from pf2lora.run.workload import Workload
from pf2lora.settings import checked

WINDOW = 16  # batches among which rows are shared out by length
FEW_LENGTHS = 32  # what a batch's length is rounded up to where each length is recorded or compiled


@dataclass(frozen=True)
class Trial:
    """A method, set up and not yet begun, with one or more seeds. A *learner* is a client with one seed (a pooled
    method has one for each seed); `state` and `source` have them seed by seed."""

    workload: Workload
    seeds: tuple[int, ...]
    model: TwoLevelModel
    method: Method
    F: Loss
    source: EncodedSource
    state: State
    schedule: Schedule
    measured_fully: bool = True  # at the end, with what is too costly for every round; not of a mere try
    of_run: Workload | None = None  # of all clients, where other processes have some
    shared: Share | None = None  # and who has whom

    @property
    def whole(self) -> Workload:
        """The workload of all clients, of which this process may have a part."""
        return self.of_run or self.workload

    @property
    def share(self) -> Share:
        """Whose clients are whose."""
        return self.shared or Share.of_one(len(self.workload.clients))

    @property
    def learners(self) -> Share:
        """The same for one seed's learners, who are clients but for a pooled one."""
        return self.share.of_copies() if self.method.pooled else self.share

    @property
    def names(self) -> list[str]:
        """Of one seed's learners, in all processes."""
        return list(self.source.clients) if self.method.pooled else self.whole.names

    @property
    def room(self) -> Room:
        """How much of a local step shares a pass."""
        return self.workload.task.rooms.training

    @cached_property
    def stepper(self) -> Stepper:
        """How a local step is run, in rounds and alone: what is recorded in the one is replayed in the other."""
        stepper = make_stepper(self.F, self.workload.device, graphs=self.workload.config.model.graphs)
        self.room.holders.add(stepper)
        return stepper

    @property
    def rates(self) -> Rates:
        """The learners' rates, where they are not the method's numbers."""
        return self.schedule.rates_of(len(self.source.clients))


def set_up(
    workload: Workload,
    name: str,
    *seeds: int,
    place: tuple[int, int] | None = None,
    compiled: bool = True,
    own_rates: Sequence[Mapping[str, float]] = (),
) -> Trial:
    """The method called `name` on the workload, from its first state.

    `place` is the position of the workload's one client among all of them, and how many there are: a site of a
    federation sees nobody else's data. `compiled` off leaves the model as it is, for a mere check. `own_rates` are what
    differs between federations side by side, one table for each of `seeds`, of which several may be the same then.
    """
    config, kind, whole, share = workload.config, METHODS[name], workload, share_of(workload)
    workload = part_of(whole, share)
    model = TwoLevelModel(workload.base, adapter_spec(config, name))
    try:
        if compiled and compiles(workload, name, len(seeds)):
            model.compile(lengths(workload))
        model.repeat_layers(config.model.checkpointing == "on")
        names = ["pooled"] if kind.pooled else workload.names
        clients = len(names) if kind.pooled else len(whole.clients)
        positions = (0,) if kind.pooled else share.here
        if place is not None:
            positions, clients = (place[0],), place[1]
        run = surroundings(
            config,
            name,
            model.common_layout,
            clients=clients,
            positions=positions * len(seeds),
            personal_layout=model.personal_layout,
            validated=tuple(bool(client.validation) for client in workload.clients) * len(seeds),
        )
        method = method_in(config, name, run)
        private = privacy.mechanism(config, kind, clients, seeds)
        if private is not None:
            privacy.check_sent(method)
        # Noise protects from what a client sends, not from how others are judged by it.
        judged = private is None
        schedule = replace(
            schedule_of(config, *seeds),
            privacy=private,
            compare_updates=judged,
            own_rates=tuple(own_rates),
        )
        if kind.federated and whole.validation is not None and config.training.personal_steps != 0:
            averaged = len(participants(seeds[0], 1, clients, schedule.participation))
            schedule = replace(schedule, alone=alone_factor(averaged))
        rows = whole.train.pooled() if kind.pooled else workload.train
        learners = len(participants(seeds[0], 1, len(whole.clients), schedule.participation))
        size = method.batch_size(config.training.batch_size, learners)
        # The trial's own: a method that takes more memory leaves the others theirs.
        rooms = Rooms.of(config.training.most_per_pass, config.training.micro_batch or size)
        workload = replace(workload, task=workload.task.in_rooms(rooms))
        source = batch_source(config, rows, names, seeds, size, method.draws, rooms.training)
        first = zip(*(model.initial(seed, names) for seed in seeds))
        state = method.init(*(torch.cat(t) for t in first))  # on the host: the engine moves whom it trains
    except BaseException:
        model.remove()
        raise
    loss = partial(workload.task.loss, model)
    return Trial(workload, seeds, model, method, loss, source, state, schedule, of_run=whole, shared=share)


def surroundings(
    config: Config,
    name: str,
    layout: Layout,
    *,
    clients: int,
    positions: tuple[int, ...],
    personal_layout: Layout = NO_LAYOUT,
    validated: tuple[bool, ...] = (),
) -> Surroundings:
    """What a run tells the method called `name`."""
    return Surroundings(
        layout,
        rank=method_table(config, name).get("rank", config.adapter.rank),
        clients=clients,
        positions=positions,
        precision=config.model.precision,
        personal_layout=personal_layout,
        validated=validated,
        scaling=config.adapter.scaling,
        client_scaling=config.adapter.client_scaling,
    )


def method_table(config: Config, name: str) -> dict[str, Any]:
    """`[methods.NAME]`, checked: the method's own fields and the ranks of its adapter."""
    kind = METHODS[name]
    given = config.methods.get(name, config.methods.get(kind.name, {}))
    return checked(kind.parameters(), given, f"[methods.{kind.name}]")


def method_settings(config: Config, name: str) -> dict[str, Any]:
    """Values for the method's own fields: from `[methods.NAME]`, else what the run's settings call the same."""
    kind, given = METHODS[name], method_table(config, name)
    own = {f.name for f in fields(kind)} - kind.derived
    shared = {key: getattr(config.training, key) for key in own if hasattr(config.training, key)}
    return shared | {key: value for key, value in given.items() if key in own}


def method_in(config: Config, name: str, run: Surroundings) -> Method:
    """The method, set up. Here `lr = "auto"` becomes a number: a site and its server have it from the same layout."""
    settings = method_settings(config, name)
    lr = rate_of(config, name, settings["lr"], run.layout)
    return METHODS[name].set_up(run, settings | {"lr": lr})


def rate_of(config: Config, name: str, given: GivenRate, layout: Layout) -> float:
    """A method's `lr` as a number. `auto` is the task's, found where clients' steps are averaged (or pooled); who
    trains alone has a smaller one."""
    kind = METHODS[name]
    averaged = kind.federated or kind.pooled
    return rate_in_numbers(given, layout, config.task.rate * (1 if averaged else alone_factor()))


def first_rates(workload: Workload, names: Sequence[str]) -> dict[str, float]:
    """The methods' `lr` on this model, as numbers: it goes by widths, which all of them have alike."""
    config = workload.config
    model = TwoLevelModel(workload.base, adapter_spec(config, names[0]))
    model.remove()
    given = {name: method_settings(config, name)["lr"] for name in names}
    return {name: rate_of(config, name, lr, model.common_layout) for name, lr in given.items()}


def first_rate(workload: Workload, name: str) -> float:
    """The same of one."""
    return first_rates(workload, [name])[name]


def values_of(method: Method) -> dict[str, Any]:
    """What a method that is set up has in its own fields, as far as a result can have it: what `auto` came to."""
    own = {f.name: getattr(method, f.name) for f in fields(method) if f.name not in method.derived}
    return {name: value for name, value in own.items() if isinstance(value, str | int | float | None)}


def adapter_spec(config: Config, name: str) -> AdapterSpec:
    """The adapter of a method: of the run's ranks, or of those that the method says."""
    ranks = METHODS[name].adapter_ranks(
        config.adapter.rank, config.adapter.client_rank, method_table(config, name)
    )
    bias = METHODS[name].client_bias
    if bias is None:
        bias = config.adapter.client_bias
    if bias is None:
        bias = method_settings(config, name).get("client_lr") == "auto"
    two_level = METHODS[name].two_level
    return replace(
        config.adapter,
        rank=ranks[0],
        client_rank=ranks[1],
        client_bias=bias and two_level,
        client_layer=config.adapter.client_layer and two_level and METHODS[name].client_bias is None,
        head=METHODS[name].head_placement(config.adapter.head),
    )


def merging_method(config: Config, name: str, layout: Layout, clients: int) -> Method:
    """The method as a server has it, which merges and has no client at hand."""
    return method_in(config, name, surroundings(config, name, layout, clients=clients, positions=()))


def batch_source(
    config: Config,
    rows: Encoded,
    names: list[str],
    seeds: tuple[int, ...],
    size: int,
    draws: int,
    room: Room | None = None,
) -> EncodedSource:
    """Training batches of `size` rows as the config describes them, `draws` for each local step; of which so many as
    there is `room` for are computed at once."""
    once_per_length = config.model.compile or (config.model.graphs and rows.device.type == "cuda")
    return EncodedSource(
        replace(rows, pad_to_multiple_of=FEW_LENGTHS) if once_per_length else rows,
        names,
        size,
        seeds,
        keyed=config.adapter.dropout > 0,
        window=WINDOW if config.training.group_by_length else 1,
        alike=draws if once_per_length else 1,
        room=room,
    )


def schedule_of(config: Config, *seeds: int) -> Schedule:
    """The rounds of a run."""
    t = config.training
    most = 0 if t.strict else t.max_bad_clients
    return Schedule(
        rounds=t.rounds,
        steps=t.steps,
        participation=t.participation,
        weighting=t.weighting,
        clients_per_pass=t.most_per_pass,
        seeds=seeds,
        max_bad=most,
        rates=RateSchedule(t.schedule, t.warmup),
    )


def check_methods(workload: Workload) -> None:
    """Set every method up once: a mistake in the last one should not cost the training of the first."""
    for name in workload.config.training.method:
        set_up(workload, name, workload.config.training.seed, compiled=False).model.remove()
