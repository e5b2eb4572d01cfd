"""One method with one seed: train, measure at both points of a round, and say what looks wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.ranks import client_share, learned_ranks
from pf2lora.engines.local import Round, Step, train
from pf2lora.run import costs
from pf2lora.run.evaluation import (
    Measured,
    evaluation_rounds,
    finite,
    finite_numbers,
    measure,
    models_in_use,
    not_finite,
    summary,
)
from pf2lora.run.result import POINTS, Numbers, RoundRecord, SeedRun
from pf2lora.run.set_up import Trial
from pf2lora.tasks.base import Example

HARDLY = 1e-5  # a relative change of y over a round below this counts as not moving


@dataclass(frozen=True)
class Outcome:
    """A finished trial: its record for result.json, what each client is served, and what all of them share."""

    record: SeedRun
    served_common: Tensor  # (clients, P)
    served_personal: Tensor  # (clients, Q)
    common: Tensor | None  # (P,)
    model: TwoLevelModel
    examples: list[list[Example]]  # a few of each client's answers, for the report


@dataclass
class Watched:
    """What is noted while a trial goes on."""

    rounds: list[RoundRecord] = field(default_factory=list)
    steps: costs.StepLedger = field(default_factory=costs.StepLedger)
    sent: list[int] = field(default_factory=list)  # numbers, by round and client
    evaluation_seconds: float = 0.0
    last: dict[str, Measured] = field(default_factory=dict)  # by point


def run(
    trial: Trial,
    on_round: Callable[[RoundRecord], None],
    on_step: Callable[[int], None] = lambda clients: None,
) -> Outcome:
    """Train, and measure as the config says. `on_round` gets each round's record as it happens, `on_step` how many
    clients did another step."""
    workload, config, method = trial.workload, trial.workload.config, trial.method
    measured_rounds = evaluation_rounds(config.training)
    watched, moving = Watched(), Moving(trial.state.y)

    def stepped(step: Step) -> None:
        watched.steps.add(step)
        on_step(step.clients)

    costs.start_memory_count(workload.device)
    for done in train(
        method,
        trial.F,
        trial.state,
        trial.source,
        trial.schedule,
        device=workload.device,
        on_step=stepped,
        graphs=config.model.graphs,
    ):
        started = time.perf_counter()
        record = round_record(trial, done, measured_rounds, watched)
        watched.evaluation_seconds += time.perf_counter() - started
        sent = method.sent_numbers(done.served)
        watched.sent += [sent[k] for k in done.participants]
        if method.two_level:
            moving.look(done.served.y, done.participants)
        watched.rounds.append(record)
        on_round(record)
    memory = costs.peak_memory(
        workload.device
    )  # before operations are counted, which takes memory of its own
    record_of_seed = seed_run(trial, watched, moving.still if method.two_level else [], memory)
    served = models_in_use(trial, done.served, done.number)
    common = common_vector(trial, done) if method.federated or method.pooled else None
    return Outcome(record_of_seed, *served, common, trial.model, watched.last["served"].examples)


class Moving:
    """Whether client adapters still move."""

    def __init__(self, personal: Tensor) -> None:
        self.previous = personal.clone()
        self.still = [False] * len(personal)

    def look(self, personal: Tensor, participants: Sequence[int]) -> None:
        personal = personal.cpu()
        change = (personal - self.previous).norm(dim=1) / self.previous.norm(dim=1).clamp_min(1e-30)
        for k in participants:
            self.still[k] = bool(change[k] < HARDLY)
        self.previous.copy_(personal)


def seed_run(trial: Trial, watched: Watched, still: Sequence[bool], memory: int | None) -> SeedRun:
    """The record of a finished trial."""
    workload, method = trial.workload, trial.method
    metrics = workload.task.metrics
    scores = {point: watched.last[point].scores if point in watched.last else None for point in POINTS}
    flops = watched.steps.flops(trial.F, trial.source, trial.state, workload.device)
    served = summary(metrics, scores["served"])
    assert served is not None
    return SeedRun(
        seed=trial.seed,
        served=served,
        before_averaging=summary(metrics, scores["before_averaging"]),
        rounds=watched.rounds,
        layers=trial.model.layer_names,
        parameters=costs.parameters(method, trial.model.personal_layout, trial.state),
        bytes_per_round=costs.sent_bytes(method, watched.sent),
        flops_per_round=flops / trial.schedule.rounds,
        seconds=sum(r.seconds for r in watched.rounds),
        evaluation_seconds=watched.evaluation_seconds,
        peak_memory_bytes=memory,
        warnings=[
            *workload.notes,
            *workload.task.notes,
            *not_finite(workload.names, metrics, scores["served"]),
            *training_warnings(workload.names, watched.rounds, still),
        ],
    )


def round_record(trial: Trial, done: Round, measured_rounds: set[int], watched: Watched) -> RoundRecord:
    """A round as result.json and metrics.jsonl hold it."""
    share = done.stats.second_order
    record = RoundRecord(
        round=done.number,
        seconds=done.seconds,
        train_loss=per_client(trial, done, done.stats.loss),
        second_order_share=None if share is None else per_client(trial, done, share),
    )
    if done.number not in measured_rounds:
        return record
    final = done.number == trial.schedule.rounds
    common, personal = models_in_use(trial, done.served, done.number)
    watched.last = {"served": measure(trial, common, personal, final=final)}
    if trial.method.federated:
        watched.last["before_averaging"] = measure(
            trial, *models_in_use(trial, done.before, done.number), final=final
        )
    scores = {
        point: {metric: finite_numbers(values) for metric, values in found.scores.items()}
        for point, found in watched.last.items()
    }
    model, spec = trial.model, trial.model.spec
    adapters = model.common_layout, model.personal_layout, common, personal, spec.scaling, spec.client_scaling
    shares = client_share(*adapters).tolist() if trial.method.two_level else None
    return replace(
        record,
        served=scores["served"],
        before_averaging=scores.get("before_averaging"),
        client_share=None if shares is None else finite_numbers(shares),
        ranks=learned_ranks(*adapters).tolist(),
    )


def per_client(trial: Trial, done: Round, steps: Tensor) -> Numbers:
    """The mean over a round's steps `(steps, K)` for every client; None for those that did not take part."""
    count = len(trial.workload.clients)
    means = [finite(value) for value in steps.mean(0).tolist()]
    if trial.method.pooled:
        return means * count
    values: Numbers = [None] * count
    for k, value in zip(done.participants, means):
        values[k] = value
    return values


def common_vector(trial: Trial, done: Round) -> Tensor:
    """What all clients share: the server's last answer. Personal heads stay home: it has the one all began with."""
    if trial.method.pooled:
        return done.served.x[0]
    return torch.cat([done.common, trial.state.x[0, len(done.common) :].to(done.common)])


def second_order_shares(rounds: Sequence[RoundRecord]) -> Numbers:
    """The share of every client in every round that it took part in."""
    return [
        (r.second_order_share or [None] * len(r.train_loss))[k]
        for r in rounds
        for k, loss in enumerate(r.train_loss)
        if loss is not None
    ]


def training_warnings(
    names: Sequence[str], rounds: Sequence[RoundRecord], still: Sequence[bool]
) -> list[str]:
    """What a user should look at: a loss above its start, client adapters that do not move."""
    found = []
    for k, name in enumerate(names):
        losses = [loss for r in rounds if (loss := r.train_loss[k]) is not None]
        if len(losses) > 1 and losses[-1] > losses[0]:
            found.append(
                f"client {name!r}: the training loss rose above its start ({losses[0]:.3f} → {losses[-1]:.3f}); "
                f"a smaller lr or client_lr may help"
            )
        if still and still[k]:
            found.append(
                f"client {name!r}: its own adapter has stopped moving (less than {HARDLY:g} of its size in the last "
                f"round); a larger client_lr may help"
            )
    return found
