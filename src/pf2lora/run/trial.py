"""One method with its seeds: train, measure at both points of a round, choose what to deploy, say what looks wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.method import State
from pf2lora.core.ranks import Adapters, client_share, learned_ranks
from pf2lora.engines.local import After, Round, train
from pf2lora.engines.room import attempt
from pf2lora.engines.steps import Step
from pf2lora.run import costs, privacy
from pf2lora.run.cadence import rounds_to_evaluate
from pf2lora.run.deploy import PERSONAL, SERVED, Deployment, candidates
from pf2lora.run.evaluation import (
    Measured,
    Models,
    finite,
    finite_numbers,
    models_in_use,
    not_finite,
    summary,
)
from pf2lora.run.gathering import all_choices, all_steps, largest, measure_all, rows_at_first
from pf2lora.run.result import POINTS, ROUND_POINTS, Numbers, RoundRecord, SeedRun
from pf2lora.run.set_up import Trial, values_of
from pf2lora.run.validation import SampledJudges
from pf2lora.run.warnings import left_out_warnings, training_warnings
from pf2lora.run.watched import Watched
from pf2lora.tasks.base import Example


@dataclass(frozen=True)
class Outcome:
    """A finished trial with one seed: its record for result.json, what each client deploys (without validation rows:
    what it is served), and what all of them share. Of several processes, the first has every client's adapters."""

    record: SeedRun
    common_of_client: Tensor  # (clients, P)
    personal_of_client: Tensor  # (clients, Q)
    common: Tensor | None  # (P,)
    model: TwoLevelModel
    examples: list[list[Example]]  # a few answers of what each client deploys, for the report


class Keeper(Protocol):
    """Who keeps what a trial needs to go on (run/checkpoints.py)."""

    def begun(self, trial: Trial, watched: Watched) -> tuple[State, After] | None:
        """Where the trial stood when it was interrupted, and `watched` as it was then; None: it was not begun."""
        ...

    def after_round(self, trial: Trial, done: Round, watched: Watched) -> None:
        """A round is over, and another follows."""
        ...


def run(
    trial: Trial,
    on_round: Callable[[int, RoundRecord], None],
    on_step: Callable[[int], None] = lambda clients: None,
    keeper: Keeper | None = None,
    on_begun: Callable[[int], None] = lambda rounds: None,
) -> list[Outcome]:
    """Train, and measure as the config says; an outcome for each seed. `on_round` gets each round's records as they
    happen, with their seeds, `on_step` how many learners did another step. A `keeper` keeps what the trial needs to go
    on, and knows whether it was begun before; `on_begun` is told how many rounds of it are over then."""
    workload = trial.workload
    measured_rounds = rounds_to_evaluate(trial.whole)
    watched = Watched.of(trial)
    begun = keeper.begun(trial, watched) if keeper else None
    state, after = begun or (trial.state, None)
    if begun:
        on_begun(watched.rounds[0][-1].round)

    def stepped(step: Step) -> None:
        watched.steps.add(step)
        on_step(
            round(step.clients * len(trial.names) / len(trial.source.clients))
        )  # other processes' beside them

    costs.start_memory_count(workload.device)
    for done in train(
        trial.method,
        trial.F,
        state,
        trial.source,
        trial.schedule,
        device=workload.device,
        on_step=stepped,
        stepper=trial.stepper,
        judges=SampledJudges(trial) if watched.deployment else None,
        after=after,
        share=trial.learners,
        room=trial.room,
    ):
        started = time.perf_counter()
        records, last = round_records(trial, done, measured_rounds, watched)
        watched.evaluation_seconds += time.perf_counter() - started + done.resize_seconds
        watched.resize_seconds += done.resize_seconds
        watched.note(trial, done)
        for s, (seed, record) in enumerate(zip(trial.seeds, records)):
            watched.keep(s, record)
            on_round(seed, record)
        if last:
            break
        if keeper is not None:
            keeper.after_round(trial, done, watched)
    # Before operations are counted, which takes memory of its own.
    return outcomes(trial, done, watched, watched.peak_memory(trial))


def round_records(
    trial: Trial,
    done: Round,
    measured_rounds: set[int],
    watched: Watched,
) -> tuple[list[RoundRecord], bool]:
    """A round as result.json and metrics.jsonl hold it, for each seed; and whether it is the last."""
    records = [plain_record(trial, done, s) for s in range(len(trial.seeds))]
    last = done.number == trial.schedule.rounds
    if done.number not in measured_rounds:
        return records, last
    with trial.share.processes.together():
        served = models_in_use(trial, done.served, done.number)
        offered = dict(candidates(trial, done, served))
    losses: Numbers | None = None
    deployment = watched.deployment
    if deployment is not None:
        common = common_vectors(trial, done) if trial.method.federated or trial.method.pooled else None
        found = deployment.look(done, offered, common)
        losses = finite_numbers(found.tolist())
        last = last or watched.stopper.enough(found)
    points = ROUND_POINTS if trial.workload.config.training.evaluate_before else (SERVED,)
    watched.last = {
        name: measure_all(trial, models, final=last) for name, models in offered.items() if name in points
    }
    if last and deployment is not None:
        finish(trial, done, offered, watched, deployment)
    return [
        measured_record(trial, records[s], served, losses, watched.last, s) for s in range(len(records))
    ], last


def finish(
    trial: Trial, done: Round, offered: dict[str, Models], watched: Watched, deployment: Deployment
) -> None:
    """The last candidate, and how good all of them and what clients chose are."""
    offered, processes = dict(offered), trial.share.processes
    with processes.together():
        personal = deployment.try_personal_steps(done, offered[SERVED])
    if personal is not None:
        offered[PERSONAL] = personal
    for name, models in offered.items():
        if name not in watched.last:
            watched.last[name] = measure_all(trial, models)
    with processes.together():
        deployment.choose()
    as_served = all(c.candidate == SERVED and c.round == done.number for c in all_choices(trial, deployment))
    watched.deployed = (
        watched.last[SERVED] if as_served else measure_all(trial, deployment.models, final=True)
    )


def own_slice(trial: Trial, s: int) -> slice:
    """The learners of the seed at position `s`, one for each client of the run."""
    count = len(trial.whole.clients)
    return slice(s * count, (s + 1) * count)


def plain_record(trial: Trial, done: Round, s: int) -> RoundRecord:
    """What every round has: its time, shared among the seeds of the pass, and the training's figures."""
    share, own = done.stats.second_order, trial.names
    return RoundRecord(
        round=done.number,
        seconds=done.seconds / len(trial.seeds),
        train_loss=per_client(trial, done, done.stats.loss, s),
        second_order_share=None if share is None else per_client(trial, done, share, s),
        left_out={own[i % len(own)]: why for i, why in done.left_out.items() if i // len(own) == s},
    )


def measured_record(
    trial: Trial,
    record: RoundRecord,
    served: Models,
    losses: Numbers | None,
    measured: dict[str, Measured],
    s: int,
) -> RoundRecord:
    """A round's record with what was measured of one seed."""
    own, here = own_slice(trial, s), trial.share.own(s)
    scores = {
        point: {metric: finite_numbers(values[own]) for metric, values in measured[point].scores.items()}
        for point in ROUND_POINTS
        if point in measured
    }
    model, spec = trial.model, trial.model.spec
    adapters = Adapters(
        model.common_layout,
        model.personal_layout,
        served.common[here],
        served.personal[here],
        spec.scaling,
        spec.client_scaling,
    )
    everyone = trial.share.everyone
    shares = everyone(client_share(adapters).tolist()) if spec.client_rank else None
    return replace(
        record,
        validation_loss=None if losses is None else losses[own],
        served=scores["served"],
        before_averaging=scores.get("before_averaging"),
        client_share=None if shares is None else finite_numbers(shares),
        ranks=everyone(learned_ranks(adapters).tolist()),
    )


def outcomes(trial: Trial, done: Round, watched: Watched, memory: int | None) -> list[Outcome]:
    """What each seed came to."""
    deployment = watched.deployment
    shared = trial.method.federated or trial.method.pooled
    common: list[Tensor] | None = list(common_vectors(trial, done)) if shared else None
    if deployment is None:
        models = models_in_use(trial, done.served, done.number)
    else:
        models = deployment.models
        common = [best.vector for best in deployment.common] if shared else None
    memory, steps = largest(trial, memory), all_steps(trial, watched.steps)

    def counted() -> float | None:
        """A client's step keeps everything while it is counted: where there is no memory for that, nobody knows."""
        trial.room.give_back()  # what was recorded is over
        found = attempt(steps.flops, trial.F, trial.source, trial.state, trial.workload.device)
        return None if found is None else found[0] / len(trial.seeds) / done.number

    flops = trial.share.processes.from_first(counted) if trial.measured_fully else None
    found = []
    for s in range(len(trial.seeds)):
        own, here = own_slice(trial, s), trial.share.own(s)
        record = seed_run(trial, watched, s)
        record = replace(record, flops_per_round=flops, peak_memory_bytes=memory)
        examples = (watched.deployed or watched.last[SERVED]).examples[own]
        vector = None if common is None else common[s]
        common_of, personal_of = (rows_at_first(trial, t[here]) for t in models)
        found.append(Outcome(record, common_of, personal_of, vector, trial.model, examples))
    return found


def seed_run(trial: Trial, watched: Watched, s: int) -> SeedRun:
    """The record of a finished trial with the seed at position `s`."""
    workload, method, own = trial.whole, trial.method, own_slice(trial, s)
    deployment, moving = watched.deployment, watched.moving
    metrics = workload.task.metrics
    scores = {name: found.of(own).scores for name, found in watched.last.items()}
    candidates = {name: over for name, found in scores.items() if (over := summary(metrics, found))}
    deployed = watched.deployed.of(own).scores if watched.deployed else None
    learners, everyone = len(trial.names), trial.learners.everyone
    still = everyone(moving.still)[s * learners : (s + 1) * learners] if moving else []
    return SeedRun(
        seed=trial.seeds[s],
        served=candidates["served"],
        before_averaging=candidates.get("before_averaging"),
        deploy=summary(metrics, deployed),
        choices=all_choices(trial, deployment)[own] if deployment else None,
        candidates=candidates if deployment else {},
        rounds=watched.rounds[s],
        layers=trial.model.layer_names,
        parameters=costs.parameters(
            *(method, trial.model.personal_layout, trial.state),
            trained=everyone(method.trained_numbers(trial.state)),
        ),
        bytes_per_round=costs.sent_bytes(watched.sent[s]),
        flops_per_round=None,
        seconds=watched.seconds[s],
        evaluation_seconds=watched.evaluation_seconds / len(trial.seeds),
        resize_seconds=watched.resize_seconds / len(trial.seeds),
        peak_memory_bytes=None,
        resampled={
            point: found
            for point, measured in {**watched.last, "deploy": watched.deployed}.items()
            if point in POINTS and measured and (found := measured.of(own).uncertainty())
        },
        confusion=(watched.deployed or watched.last[SERVED]).of(own).confusion or None,
        common_round=deployment.common[s].round if deployment and deployment.common else None,
        settings=values_of(method),
        warnings=[
            *workload.notes,
            *workload.task.notes,
            *not_finite(workload.names, metrics, scores["served"]),
            *training_warnings(
                workload.names,
                watched.rounds[s],
                still,
                client_lr=moving is not None,
            ),
            *left_out_warnings(watched.left_out[s], watched.rounds[s][-1].round),
        ],
        privacy=privacy.spent(
            *(workload.config, trial.schedule.privacy, learners, trial.seeds[s], watched.rounds[s][-1].round)
        ),
    )


def per_client(trial: Trial, done: Round, steps: Tensor, s: int) -> Numbers:
    """The mean over a round's steps `(steps, K)` for every client of a seed; None for those that did not take part."""
    count, learners = len(trial.whole.clients), len(trial.names)
    means = {i: finite(value) for i, value in zip(done.participants, steps.mean(0).tolist())}
    own = [means.get(s * learners + k) for k in range(learners)]
    return own * count if trial.method.pooled else own


def common_vectors(trial: Trial, done: Round) -> Tensor:
    """What all clients share `(seeds, P)`: the servers' last answers. Of what stays home, as personal heads do, it has
    what all began with."""
    if trial.method.pooled:
        return done.served.x
    first = trial.state.x[:: len(trial.source.clients)]
    return trial.method.common(first.to(done.common), done.common, done.number)


def second_order_shares(rounds: Sequence[RoundRecord]) -> Numbers:
    """The share of every client in every round that it took part in."""
    return [
        (r.second_order_share or [None] * len(r.train_loss))[k]
        for r in rounds
        for k, loss in enumerate(r.train_loss)
        if loss is not None
    ]
