"""A new client joins a finished run: its own adapter is fitted on the frozen common one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pf2lora.core.method import Method
from pf2lora.data.client import Client
from pf2lora.data.per_client import check_name
from pf2lora.data.split import rng_for, split_rows
from pf2lora.engines.batches import Encoded, EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.methods.local import Local
from pf2lora.methods.newcomer import Newcomer
from pf2lora.run import folder as run_folder
from pf2lora.run import trial
from pf2lora.run.experiment import TASKS
from pf2lora.run.folder import LoadedRun
from pf2lora.run.progress import track
from pf2lora.tasks.classification.rows import MINIMUM_ROWS

Scores = dict[str, float | None]


def onboard(run: LoadedRun, name: str, file: Path, rounds: int | None = None) -> dict[str, Scores]:
    """Fit D and C for a newcomer, compare, and add it to the run.

    Returns the scores of the common adapter alone, of the newcomer's own adapter on it, and of training alone.
    """
    saved = run_folder.read_description(
        run.where
    )  # as it is now: others may have joined since the run was opened
    run = replace(run, saved=saved)
    check_newcomer(run, name)
    config = replace(run.config, rounds=run.config.rounds if rounds is None else rounds)
    run = replace(run, config=config)
    client = read_client(run, name, file)
    train_rows = run.task.encode([client.train], training=True).to(run.device)
    test_rows = run.task.encode([client.test], training=False).to(run.device)
    source = trial.source_of(config, train_rows, [name], run.saved.seed, Newcomer.draws)

    x, _ = run.common()
    first_x, y = (t.to(run.device) for t in run.model.initial(run.saved.seed, [name]))
    rates = rates_of(run)
    newcomer = Newcomer(run.model.x, rates["lr"], rates["weight_decay"], client_lr=rates["client_lr"])
    alone = Local(run.model.x, rates["lr"], rates["weight_decay"])
    own_x, own_y = fit(run, newcomer, source, x, y)
    alone_x, _ = fit(run, alone, source, first_x, run.zero_y())  # D = C = 0: a plain LoRA of the common rank
    found = {
        "common adapter alone": measure(run, client, test_rows, x, run.zero_y()),
        "own adapter on it": measure(run, client, test_rows, own_x, own_y),
        "training alone": measure(run, client, test_rows, alone_x, run.zero_y()),
    }
    run_folder.save_client(run.where, run.model, name, own_x[0], own_y[0], run.task.name, config.model)
    run_folder.write_json(run.where / "clients" / name / "onboarding.json", found)
    run_folder.save_description(run.where, replace(saved, clients=[*saved.clients, name]))
    return found


def check_newcomer(run: LoadedRun, name: str) -> None:
    check_name(name, "--client")
    if name in run.saved.clients:
        raise UserError(f"{run.folder} has a client {name!r} already; a newcomer needs another name")
    if not METHODS[run.saved.method].two_level:
        raise UserError(
            f"{run.folder} was trained with {run.saved.method!r}, which has no client adapters; onboard needs a run of "
            f"'pf2lora' or 'pf2lora-joint'"
        )


def rates_of(run: LoadedRun) -> dict[str, float]:
    """The learning rates that the run's own clients had."""
    given = trial.method_settings(run.config, run.saved.method)
    return {key: given.get(key, getattr(run.config, key)) for key in ("lr", "client_lr", "weight_decay")}


def read_client(run: LoadedRun, name: str, file: Path) -> Client[Any]:
    """The newcomer's rows, a share of them held out for the comparison."""
    rows = TASKS[run.config.task].read(run.config, file, run.saved.labels)
    if len(rows) < MINIMUM_ROWS:
        raise UserError(f"{file}: client {name!r} has {len(rows)} rows; at least {MINIMUM_ROWS} are needed")
    keys = [getattr(row, "label", "") for row in rows]
    random = rng_for(run.saved.seed, "split", name)
    return Client(name, *split_rows(rows, keys, run.config.data.test_ratio, random))


def fit(run: LoadedRun, method: Method, source: EncodedSource, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As many local steps as the run's own clients had."""
    config = run.config
    schedule = Schedule(config.rounds, config.steps, seed=run.saved.seed)
    loss = partial(run.task.loss, run.model)
    with track(config.rounds * config.steps, f"{method.label}: steps") as advance:
        rounds = train(method, loss, method.init(x, y), source, schedule, device=run.device, on_step=advance)
        last = deque(rounds, maxlen=1).pop()
    return last.served.x, last.served.y


def measure(run: LoadedRun, client: Client[Any], test: Encoded, x: Tensor, y: Tensor) -> Scores:
    answers = run.task.predict(run.model, x, y, test, final=True)[0]
    return {metric: trial.finite(v) for metric, v in run.task.score(answers, client.test).items()}
