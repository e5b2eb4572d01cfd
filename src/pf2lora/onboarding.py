"""A new client joins a finished run: its own adapter is fitted on the frozen common one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pf2lora import run_folder, trial
from pf2lora.adapters import TwoLevelModel
from pf2lora.data.batches import Encoded, EncodedSource
from pf2lora.data.client import Client
from pf2lora.data.per_client import check_name
from pf2lora.data.split import rng_for, split_rows
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.experiment import TASKS, on_device
from pf2lora.method import Method
from pf2lora.methods import METHODS
from pf2lora.methods.local import Local
from pf2lora.methods.newcomer import Newcomer
from pf2lora.progress import track
from pf2lora.run_folder import LoadedRun

Scores = dict[str, float | None]


def onboard(run: LoadedRun, name: str, file: Path, rounds: int | None = None) -> dict[str, Scores]:
    """Fit D and C for a newcomer, compare, and add it to the run.

    Returns the scores of the common adapter alone, of the newcomer's own adapter on it, and of training alone.
    """
    check_newcomer(run, name)
    config = replace(run.config, rounds=rounds or run.config.rounds)
    run = replace(run, config=config)
    client = read_client(run, name, file)
    train_rows = on_device(run.task.encode([client.train], training=True), run.device)
    test_rows = on_device(run.task.encode([client.test], training=False), run.device)
    source = EncodedSource(train_rows, [name], config.batch_size, run.saved.seed, config.dropout > 0)

    x, _ = run.common()
    y = run.model.initial(run.saved.seed, [name])[1].to(run.device)
    found = {
        "common adapter alone": measure(run, run.model, client, test_rows, x, y)
    }  # D = 0: y adds nothing yet
    newcomer = Newcomer(run.model.x, lr=config.lr, client_lr=client_lr(run))
    x, y = fit(run, run.model, newcomer, source, x, y)
    found["own adapter on it"] = measure(run, run.model, client, test_rows, x, y)
    run_folder.save_client(run.where, run.model, name, x[0], y[0], run.task.name, config.model)
    run_folder.save_description(run.where, replace(run.saved, clients=[*run.saved.clients, name]))
    found["training alone"] = train_alone(run, client, source, test_rows)
    run_folder.write_json(run.where / "clients" / name / "onboarding.json", found)
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


def client_lr(run: LoadedRun) -> float:
    return float(run.config.for_method(run.saved.method, "client_lr", run.config.client_lr))


def read_client(run: LoadedRun, name: str, file: Path) -> Client[Any]:
    """The newcomer's rows, a share of them held out for the comparison."""
    rows = TASKS[run.config.task].read(run.config, file, run.saved.labels)
    keys = [getattr(row, "label", "") for row in rows]
    random = rng_for(run.saved.seed, "split", name)
    return Client(name, *split_rows(rows, keys, run.config.data.test_ratio, random))


def fit(
    run: LoadedRun, model: TwoLevelModel, method: Method, source: EncodedSource, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """As many local steps as the run's own clients had."""
    config = run.config
    schedule = Schedule(config.rounds, config.steps, seed=run.saved.seed)
    loss = partial(run.task.loss, model)
    with track(config.rounds * config.steps, f"{method.label}: steps") as advance:
        for done in train(
            method, loss, method.init(x, y), source, schedule, device=run.device, on_step=advance
        ):
            pass
    return done.served.x, done.served.y


def train_alone(run: LoadedRun, client: Client[Any], source: EncodedSource, test: Encoded) -> Scores:
    """What the newcomer gets by itself: a LoRA of the common rank, from scratch."""
    run.model.remove()
    model = TwoLevelModel(run.model.model, replace(run.model.spec, client_rank=0))
    x, y = (t.to(run.device) for t in model.initial(run.saved.seed, [client.name]))
    x, y = fit(
        run, model, Local(model.x, lr=run.config.lr, weight_decay=run.config.weight_decay), source, x, y
    )
    return measure(run, model, client, test, x, y)


@torch.no_grad()
def measure(
    run: LoadedRun, model: TwoLevelModel, client: Client[Any], test: Encoded, x: Tensor, y: Tensor
) -> Scores:
    answers = run.task.predict(model, x, y, test)[0]
    return {metric: trial.finite(v) for metric, v in run.task.score(answers, client.test).items()}
