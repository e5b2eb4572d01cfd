"""One method with one seed: train, measure at both points of a round, and say what looks wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.core.method import Loss, Method, State, moved, take
from pf2lora.core.randomness import participants
from pf2lora.core.ranks import client_share, learned_ranks
from pf2lora.data.client import Client
from pf2lora.engines.batches import Encoded, EncodedSource
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError, unknown
from pf2lora.methods import METHODS
from pf2lora.methods.bilevel import AUTO, ROUNDOFF, Bilevel
from pf2lora.methods.hetlora import initial_ranks
from pf2lora.run import costs
from pf2lora.run.config import Config, convert
from pf2lora.tasks.base import Example, Task

DERIVED = {"layout", "ranks", "precision"}  # fields of a method that follow from the model and the clients
WINDOW = 16  # batches among which rows are shared out by length
FEW_LENGTHS = 32  # what a batch's length is rounded up to where each length is recorded or compiled
EXAMPLES = 3  # answers of each client that a report shows
HARDLY = 1e-5  # a relative change of y over a round below this counts as not moving


@dataclass(frozen=True)
class Workload:
    """What all methods and seeds of a run share: the task, its clients as tokens, and the frozen base model."""

    config: Config
    task: Task[Any, Any]
    clients: list[Client[Any]]
    base: PreTrainedModel
    train: Encoded
    test: Encoded
    device: torch.device
    notes: tuple[str, ...] = ()  # what the data's reader has to say

    @property
    def names(self) -> list[str]:
        return [client.name for client in self.clients]


@dataclass(frozen=True)
class Trial:
    """A method, set up and not yet begun."""

    workload: Workload
    seed: int
    model: TwoLevelModel
    method: Method
    F: Loss
    source: EncodedSource
    state: State


@dataclass(frozen=True)
class Outcome:
    """A finished trial: its record for result.json and each client's served (x, y); `common` is what all share."""

    record: dict[str, Any]
    x: Tensor  # (clients, P)
    y: Tensor  # (clients, Q)
    common: Tensor | None  # (P,)
    model: TwoLevelModel
    examples: list[list[Example]]  # a few of each client's answers, for the report


def method_settings(config: Config, name: str) -> dict[str, Any]:
    """`[methods.NAME]`, checked: the fields of the method's class, and the ranks of its adapter."""
    hints = get_type_hints(METHODS[name])
    known = {f.name: hints[f.name] for f in fields(METHODS[name]) if f.name not in DERIVED} | {"rank": int}
    known |= {"client_rank": int} if METHODS[name].two_level else {}
    known |= {"r_max": int} if name == "hetlora" else {}
    where, checked = f"[methods.{name}]", {}
    for key, value in config.methods.get(name, {}).items():
        if key not in known:
            raise UserError(f"{where}: {unknown('key', key, known)}")
        checked[key] = convert(value, known[key], f"{where}: {key}")
    return checked


def adapter_spec(config: Config, name: str) -> AdapterSpec:
    """The adapter of a method: HETLoRA's has rank r_max, and only two-level methods have a client's own."""
    given = method_settings(config, name)
    rank = given.get("rank", config.rank)
    if name == "hetlora":
        rank = given.get("r_max", rank + rank // 2)
    client_rank = given.get("client_rank", config.client_rank) if METHODS[name].two_level else 0
    return AdapterSpec(
        rank=rank,
        client_rank=client_rank,
        scaling=config.scaling,
        client_scaling=config.client_scaling,
        dropout=config.dropout,
        targets=config.targets,
        head=config.head,
    )


def build_method(config: Config, name: str, model: TwoLevelModel, clients: int) -> Method:
    """The method called `name`, its parameters from `[methods.NAME]`, else from the top-level settings."""
    kind, given = METHODS[name], method_settings(config, name)
    own = {f.name for f in fields(kind)} - DERIVED
    settings = {key: getattr(config, key) for key in own if hasattr(config, key)}
    settings |= {key: value for key, value in given.items() if key in own}
    if name == "hetlora":
        r_max = model.spec.rank
        r_min = settings.setdefault("r_min", min(config.rank, r_max))
        settings["ranks"] = tuple(initial_ranks(clients, r_min, r_max))
    if issubclass(kind, Bilevel):
        settings["precision"] = config.precision
    return kind(model.x, **settings)


def source_of(config: Config, rows: Encoded, names: list[str], seed: int, draws: int) -> EncodedSource:
    """Training batches as the config describes them, `draws` for each local step."""
    window = WINDOW if config.group_by_length else 1
    once_per_length = config.compile or (config.graphs and rows.device.type == "cuda")
    return EncodedSource(
        replace(rows, pad_to_multiple_of=FEW_LENGTHS) if once_per_length else rows,
        names,
        config.batch_size,
        seed,
        keyed=config.dropout > 0,
        window=window,
        alike=draws if once_per_length else 1,
    )


def set_up(workload: Workload, name: str, seed: int) -> Trial:
    """A method on the workload, from its first state."""
    config = workload.config
    model = TwoLevelModel(workload.base, adapter_spec(config, name))
    if config.compile:
        model.compile()
    pooled = METHODS[name].pooled
    names = ["pooled"] if pooled else workload.names
    method = build_method(config, name, model, len(names))
    rows = workload.train.pooled() if pooled else workload.train
    source = source_of(config, rows, names, seed, method.draws)
    state = method.init(*model.initial(seed, names))  # on the host: the engine moves whom it trains
    return Trial(workload, seed, model, method, partial(workload.task.loss, model), source, state)


def served_models(trial: Trial, state: State, number: int) -> tuple[Tensor, Tensor]:
    """The (x, y) every client is measured with after round `number`; a pooled learner's is everybody's."""
    x, y = state.x, state.y
    if type(trial.method).personal is not Method.personal:
        clients, config = range(len(trial.source.names)), trial.workload.config
        per_pass = config.clients_per_pass or len(clients)
        next_batch = number * config.steps * trial.method.draws
        found = []
        for i in range(0, len(clients), per_pass):
            together = clients[i : i + per_pass]
            part = moved(take(state, together), trial.workload.device)
            batch = trial.source.draw(together, [next_batch] * len(together))
            found.append([t.to(x.device) for t in trial.method.personal(trial.F, part, batch)])
        x, y = (torch.cat(parts) for parts in zip(*found))
    count = len(trial.workload.clients)
    return (x.expand(count, -1), y.expand(count, -1)) if trial.method.pooled else (x, y)


class Measured(NamedTuple):
    """Every metric of every client (None where it was not computed), and some of the answers to be read."""

    scores: dict[str, list[float | None]]
    examples: list[list[Example]]


def evaluate(
    workload: Workload, model: TwoLevelModel, x: Tensor, y: Tensor, *, final: bool = False
) -> dict[str, list[float | None]]:
    """Every metric of every client on its own test data."""
    return measure(workload, model, x, y, final=final).scores


def measure(
    workload: Workload, model: TwoLevelModel, x: Tensor, y: Tensor, *, final: bool = False
) -> Measured:
    """Every client on its own test data; `final` also does what is too costly for every round."""
    task = workload.task
    answers = task.predict(model, x, y, workload.test, final=final)
    scores = task.score_clients(answers, [client.test for client in workload.clients])
    shown = [
        [task.example(a, row) for a, row in zip(found[:EXAMPLES], client.test)]
        for found, client in zip(answers, workload.clients)
    ]
    return Measured(
        {metric: [finite(s.get(metric)) for s in scores] for metric in task.metrics},
        [[example for example in client if example is not None] for client in shown],
    )


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def over_clients(values: Sequence[float | None], higher_is_better: bool) -> dict[str, Any]:
    """A metric's list with its mean, worst client and spread."""
    known = [v for v in values if v is not None]
    if not known:
        return {"per_client": list(values), "mean": None, "worst": None, "spread": None}
    mean = sum(known) / len(known)
    return {
        "per_client": list(values),
        "mean": mean,
        "worst": min(known) if higher_is_better else max(known),
        "spread": math.sqrt(sum((v - mean) ** 2 for v in known) / len(known)),
    }


def evaluation_rounds(config: Config) -> set[int]:
    """The rounds after which clients are measured: the last always, about ten in all."""
    every = config.evaluate_every or -(-config.rounds // 10)
    return {*range(every, config.rounds + 1, every), config.rounds}


def schedule_of(config: Config, seed: int) -> Schedule:
    return Schedule(
        config.rounds, config.steps, config.participation, config.weighting, config.clients_per_pass, seed
    )


def run(
    trial: Trial, on_round: Callable[[dict[str, Any]], None], on_step: Callable[[int], None] = lambda n: None
) -> Outcome:
    """Train, and measure as the config says. `on_round` gets each round's record as it happens."""
    workload, config, method = trial.workload, trial.workload.config, trial.method
    schedule = schedule_of(config, trial.seed)
    measured_rounds = evaluation_rounds(config)
    costs.start_memory_count(workload.device)
    flops = count_flops(trial, schedule)
    started, rounds = time.perf_counter(), []
    previous_y = trial.state.y.clone()
    still = torch.zeros(len(workload.clients), dtype=torch.bool)
    going = train(
        method,
        trial.F,
        trial.state,
        trial.source,
        schedule,
        device=workload.device,
        on_step=on_step,
        graphs=config.graphs,
    )
    for done in going:
        record, examples = round_record(trial, done, measured_rounds)
        if method.two_level:
            y = done.served.y.cpu()
            change = (y - previous_y).norm(dim=1) / previous_y.norm(dim=1).clamp_min(1e-30)
            still[done.participants] = (change < HARDLY)[done.participants]
            previous_y.copy_(y)
        rounds.append(record)
        on_round(record)
    seconds = time.perf_counter() - started
    x, y = served_models(trial, done.served, done.number)
    last = rounds[-1]
    record = {
        "seed": trial.seed,
        "served": summary(workload, last["served"]),
        "before_averaging": summary(workload, last["before_averaging"]),
        "rounds": rounds,
        "layers": trial.model.layer_names,
        "parameters": costs.parameters(trial.model.x, trial.model.y),
        "bytes_per_round": costs.bytes_per_round(method, done.served),
        "flops_per_round": flops,
        "seconds": seconds,
        "peak_memory_bytes": costs.peak_memory(workload.device),
        "warnings": [*workload.notes, *workload.task.notes, *warnings(workload, rounds, still.tolist())],
    }
    common = None if not method.federated and not method.pooled else common_vector(trial, done)
    return Outcome(record, x, y, common, trial.model, examples)


def common_vector(trial: Trial, done: Round) -> Tensor:
    """What all clients share: the server's last answer. Personal heads stay home: it has the one all began with."""
    if trial.method.pooled:
        return done.served.x[0]
    return torch.cat([done.common, trial.state.x[0, len(done.common) :].to(done.common)])


def count_flops(trial: Trial, schedule: Schedule) -> float:
    """Operations of a whole round of all clients, from one counted step of one client."""
    first = [trial.source.draw([0], [d]) for d in range(trial.method.draws)]
    one = moved(take(trial.state, [0]), trial.workload.device)
    (variants_for_round,) = trial.method.variants_for_round(one)
    counted = costs.flops_of_step(variants_for_round, trial.F, one, first)
    return counted * schedule.steps * clients_per_round(trial)


def clients_per_round(trial: Trial) -> int:
    """How many learners take part in a round."""
    return len(participants(trial.seed, 1, len(trial.source.names), trial.workload.config.participation))


def round_record(
    trial: Trial, done: Round, measured_rounds: set[int]
) -> tuple[dict[str, Any], list[list[Example]]]:
    """A round as result.json and metrics.jsonl hold it, and examples of the clients' answers."""
    workload, method, model = trial.workload, trial.method, trial.model
    count = len(workload.clients)

    def per_client(steps: Tensor | None) -> list[float | None] | None:
        if steps is None:
            return None
        means = [finite(value) for value in steps.mean(0).tolist()]
        if method.pooled:
            return means * count
        values: list[float | None] = [None] * count
        for k, value in zip(done.participants, means):
            values[k] = value
        return values

    record: dict[str, Any] = {
        "round": done.number,
        "seconds": done.seconds,
        "train_loss": per_client(done.report.loss),
        "served": None,
        "before_averaging": None,
        "client_share": None,
        "second_order_share": per_client(done.report.second_order),
        "ranks": None,
    }
    examples: list[list[Example]] = []
    if done.number in measured_rounds:
        final = done.number == workload.config.rounds
        x, y = served_models(trial, done.served, done.number)
        record["served"], examples = measure(workload, model, x, y, final=final)
        if method.federated:
            before = served_models(trial, done.before, done.number)
            record["before_averaging"] = evaluate(workload, model, *before, final=final)
        scalings = model.spec.scaling, model.spec.client_scaling
        record["ranks"] = learned_ranks(model.x, model.y, x, y, *scalings).tolist()
        if method.two_level:
            shares = client_share(model.x, model.y, x, y, *scalings).tolist()
            record["client_share"] = [finite(s) for s in shares]
    return record, examples


def summary(workload: Workload, scores: dict[str, list[float | None]] | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    metrics = workload.task.metrics
    return {name: over_clients(values, metrics[name].higher_is_better) for name, values in scores.items()}


def what_auto_did(method: Method, rounds: list[dict[str, Any]]) -> list[str]:
    """One line on where the second-order term was left out, if that was asked for."""
    if not isinstance(method, Bilevel) or method.hypergradient_mode != AUTO:
        return []
    taken = sum(loss is not None for r in rounds for loss in r["train_loss"])
    shares = [share for r in rounds for share in r["second_order_share"] or () if share is not None]
    return [
        f"second order (auto): left out in {taken - len(shares)} of {taken} client-rounds; where it was measured it "
        f"was {max(shares):.1e} of the hypergradient at most, and {method.precision} resolves "
        f"{ROUNDOFF[method.precision]:.1e}"
    ]


def warnings(workload: Workload, rounds: list[dict[str, Any]], still: list[bool]) -> list[str]:
    """What a user should look at: a loss above its start, client adapters that do not move."""
    found = []
    for k, name in enumerate(workload.names):
        losses = [r["train_loss"][k] for r in rounds if r["train_loss"][k] is not None]
        if len(losses) > 1 and losses[-1] > losses[0]:
            found.append(
                f"client {name!r}: the training loss rose above its start ({losses[0]:.3f} → {losses[-1]:.3f}); "
                f"a smaller lr or client_lr may help"
            )
        if still[k]:
            found.append(
                f"client {name!r}: its own adapter has stopped moving (less than {HARDLY:g} of its size in the last "
                f"round); a larger client_lr may help"
            )
    return found
