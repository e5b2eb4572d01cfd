"""What a run would do, before it does it: its parts are set up, a few steps are timed, and nothing is kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.method import Method, moved, take
from pf2lora.data.client import Client
from pf2lora.data.files import expand_paths
from pf2lora.data.loading import filled_in, load_clients
from pf2lora.engines.stepper import make_stepper
from pf2lora.engines.steps import local_steps, variants
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import costs
from pf2lora.run.cadence import rounds_to_evaluate
from pf2lora.run.comparison import check_validation
from pf2lora.run.config import Config
from pf2lora.run.deploy import candidate_names, rounds_alone
from pf2lora.run.first_notes import of_rows
from pf2lora.run.result import Parameters, SentBytes
from pf2lora.run.set_up import Trial, adapter_spec, merging_method, method_table, schedule_of, set_up
from pf2lora.run.workload import Workload, build_task, choose_device, load_base, load_workload
from pf2lora.tasks.base import Shown

TIMED_STEPS = 2  # after one that warms up
TIMED_ROWS = 8  # of each client's test rows, answered once
EXAMPLES = 2  # rows that are shown as the model sees them
FEW_TEST_ROWS = 100  # of a client: below, a score's own accident is above three points


@dataclass(frozen=True)
class MethodPlan:
    """What one method would cost."""

    label: str
    parameters: Parameters
    sent: SentBytes  # by each client, a round
    step_seconds: float  # of all clients
    training_seconds: float
    evaluation_seconds: float
    memory_bytes: int | None
    lr: float


@dataclass(frozen=True)
class Plan:
    """What a run would be, and what a user should look at first."""

    examples: list[Shown]
    methods: list[MethodPlan]
    warnings: list[str]


def problems(config: Config, *others: Callable[[], Any]) -> Iterator[str]:
    """Everything that would stop the run, not only the first: each file, each method, the model, the device and the
    settings by themselves; `others` are a caller's own checks."""
    data = config.data
    checks: list[Callable[[], Any]] = [
        lambda: schedule_of(config, config.training.seed),
        lambda: check_validation(config),
        lambda: filled_in(config.task, data),
        lambda: check_model(config.model.name),
        lambda: choose_device(config.model.device),
        *others,
    ]
    for name in config.training.method:
        checks.append(lambda name=name: method_table(config, name))  # type: ignore[misc]
    if data.dataset is not None:
        checks.append(lambda: load_clients(config.task, data, config.training.seed))
    for pattern in (*data.clients, *data.test, *data.validation):
        checks.append(lambda pattern=pattern: expand_paths([pattern]))  # type: ignore[misc]
        for path in _found(pattern):
            checks.append(lambda path=path: config.task.rows(config.task.read_records(path)))  # type: ignore[misc]
    found = list(dict.fromkeys(line for check in checks if (line := _problem(check))))
    yield from found
    if found or data.dataset is not None:
        return
    # What no file has by itself: clients that do not fit together.
    line = _problem(lambda: load_clients(config.task, data, config.training.seed))
    if line:
        yield line


def check_model(name: str) -> None:
    """The model must be there, as far as its tokenizer tells."""
    if not name:
        raise UserError("no base model is named: --model takes a hub name or a folder")
    load_tokenizer(name)


def _found(pattern: str) -> list[Path]:
    try:
        return expand_paths([pattern])
    except UserError:
        return []


def _problem(check: Callable[[], Any]) -> str | None:
    try:
        check()
    except UserError as error:
        return str(error)
    return None


def plan(config: Config, workload: Workload | None = None) -> Plan:
    """Load the run's parts, set every method up and time a few of its steps."""
    workload = workload or load_workload(config)
    found, failed = [], []
    for name in config.training.method:
        try:
            found.append(method_plan(workload, name))
        except UserError as error:
            failed.append(f"{METHODS[name].label}: {error}")
    if failed:
        raise UserError("; ".join(failed))
    return Plan(
        seen_examples(workload), found, [*of_rows(workload), *data_warnings(workload.clients, config)]
    )


def method_plan(workload: Workload, name: str) -> MethodPlan:
    """Set the method up with all its seeds, do a few steps of its first round, answer a few rows."""
    training = workload.config.training
    seeds = tuple(range(training.seed, training.seed + training.seeds))
    trial = set_up(workload, name, *seeds, compiled=False)
    try:
        costs.start_memory_count(workload.device)
        step = timed_steps(trial)
        evaluation = timed_answers(trial)
        memory = costs.peak_memory(workload.device)
        sent = costs.Sent()
        for number in range(1, training.rounds + 1):
            head = trial.method.leaves(number).head_size
            for numbers in trial.method.sent_numbers(trial.state, number):
                sent.add(numbers, head)
        parameters = costs.parameters(trial.method, trial.model.personal_layout, trial.state)
    finally:
        trial.model.remove()
    times = len(rounds_to_evaluate(workload)) * len(candidate_names(trial.method))
    alone = rounds_alone(training) if workload.validation is not None and trial.method.federated else 0
    share = training.participation
    return MethodPlan(
        label=METHODS[name].label,
        parameters=parameters,
        sent=costs.sent_bytes(sent),
        step_seconds=step * share,
        training_seconds=step * training.steps * (share * training.rounds + alone),
        evaluation_seconds=evaluation * times,
        memory_bytes=memory,
        lr=trial.method.lr,
    )


def sent_without_data(config: Config, labels: Sequence[str], clients: int) -> float:
    """Bytes that a client sends in a round, the mean over the rounds, for one who has the model and sees no rows."""
    (name,) = config.training.method
    task = build_task(config, labels)
    base = load_base(config, task, torch.device("cpu"))
    model = TwoLevelModel(base, adapter_spec(config, name))
    try:
        method = merging_method(config, name, model.common_layout, clients)
        first = method.init(*model.initial(config.training.seed, [str(k) for k in range(clients)]))
        sent = costs.Sent()
        for number in range(1, config.training.rounds + 1):
            for numbers in method.sent_numbers(first, number):
                sent.add(numbers, 0)
    finally:
        model.remove()
    return costs.sent_bytes(sent).total


def timed_steps(trial: Trial) -> float:
    """Seconds of one local step of all clients."""
    stepper = make_stepper(trial.F, trial.workload.device, graphs=False)
    learners = range(len(trial.source.names))
    total = 0.0
    for variant, alike in variants(trial.method, trial.state, learners, 1):

        def seconds(together: list[int], variant: Method = variant) -> float:
            part = moved(take(trial.state, together), trial.workload.device)
            for steps in (1, TIMED_STEPS):
                started = time.perf_counter()
                _, stats = local_steps(
                    variant,
                    trial.F,
                    part,
                    trial.source,
                    clients=together,
                    first_step=[0] * len(together),
                    steps=steps,
                    stepper=stepper,
                )
                stats.loss.tolist()  # a device works on behind its caller's back
            return (time.perf_counter() - started) / TIMED_STEPS

        total += sum(found for _, found in trial.room.passes(alike, seconds))
    return total


def timed_answers(trial: Trial) -> float:
    """Seconds in which every learner answers all of its test and validation rows once, from a few of them; without
    generated text, which is written at the end alone."""
    workload, task = trial.workload, trial.workload.task
    few = task.encode([client.test[:TIMED_ROWS] for client in workload.clients], training=False)
    whose = [*range(len(workload.clients))] * len(trial.seeds)
    common, personal = trial.state.x, trial.state.y
    if trial.method.pooled:
        common, personal = (t.repeat_interleave(len(workload.clients), dim=0) for t in (common, personal))
    started = time.perf_counter()
    task.predict(trial.model, common, personal, few.to(workload.device).of(whose))
    seconds = time.perf_counter() - started
    asked = sum(len(client.test[:TIMED_ROWS]) for client in workload.clients)
    return seconds / asked * sum(len(c.test) + len(c.validation) for c in workload.clients)


def seen_examples(workload: Workload) -> list[Shown]:
    """Two training rows of the first client, as the model gets them."""
    return [workload.task.show(row) for row in workload.clients[0].train[:EXAMPLES]]


def data_warnings(clients: Sequence[Client[Any]], config: Config) -> list[str]:
    """What makes a result say less than it seems to."""
    found = []
    few = [client.name for client in clients if len(client.test) < FEW_TEST_ROWS]
    if few:
        least = min(len(client.test) for client in clients)
        error = 50 / least**0.5
        found.append(
            f"{_who(few)} fewer than {FEW_TEST_ROWS} test rows (the least: {least}): a score there is uncertain by "
            f"about ±{2 * error:.0f} points"
        )
    if config.task.labelled:
        one = [c.name for c in clients if len({config.task.partition_key(row) for row in c.train}) == 1]
        if one:
            found.append(f"{_who(one)} training rows of one label only")
    trained = {config.task.asked(row) for client in clients for row in (*client.train, *client.validation)}
    again = sum(config.task.asked(row) in trained for client in clients for row in client.test)
    if again:
        rows = sum(len(client.test) for client in clients)
        found.append(
            f"{again} of {rows} test rows have a text that somebody trains on: their score tells what was remembered"
        )
    holders: Counter[tuple[str, ...]] = Counter()
    for client in clients:
        holders.update({config.task.asked(row) for row in (*client.train, *client.validation)})
    shared = sum(count > 1 for count in holders.values())
    if shared:
        found.append(f"{shared} texts are in the training rows of two clients or more")
    return found


def _who(names: Sequence[str]) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{listed} {'has' if len(names) == 1 else 'have'}"
