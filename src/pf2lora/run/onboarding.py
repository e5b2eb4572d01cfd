"""A new client joins a finished run: its own adapter is fitted on the frozen common one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pf2lora.atomic import check_writable, undone_on_failure, write_json
from pf2lora.core.method import Method, Surroundings
from pf2lora.data.client import Client, check_apart, check_name
from pf2lora.data.loading import read_rows, split_client, with_validation
from pf2lora.data.split import MINIMUM_ROWS
from pf2lora.engines.batches import Encoded
from pf2lora.engines.local import Schedule, train
from pf2lora.engines.steps import Step
from pf2lora.errors import UserError
from pf2lora.folder_lock import locked
from pf2lora.methods import METHODS
from pf2lora.methods.local import Local
from pf2lora.methods.newcomer import Newcomer
from pf2lora.run import folder
from pf2lora.run.evaluation import finite
from pf2lora.run.progress import track
from pf2lora.run.saved import LoadedRun, read_description
from pf2lora.run.set_up import batch_source, method_settings

Scores = dict[str, float | None]


def onboard(run: LoadedRun, name: str, file: Path, rounds: int | None = None) -> dict[str, Scores]:
    """Fit D and C for a newcomer, compare, and add it to the run.

    Returns the scores of the common adapter alone, of the newcomer's own adapter on it, and of training alone.
    """
    with locked(run.folder):
        return fit_and_add(run, name, file, rounds)


def fit_and_add(run: LoadedRun, name: str, file: Path, rounds: int | None) -> dict[str, Scores]:
    """`onboard`, while nobody else writes into the run folder."""
    saved = read_description(run.where)  # as it is now: others may have joined since the run was opened
    run = replace(run, saved=saved)
    check_newcomer(run, name)
    new = (run.where / "clients" / name, run.where / "state" / "clients" / f"{name}.safetensors")
    for path in (*new, run.where / "state"):
        check_writable(path)
    client = read_client(run, name, file)
    common, _ = run.common()
    first, personal = (t.to(run.device) for t in run.model.initial(saved.seed, [name]))
    settings = method_settings(run.config, saved.method)
    rates = {key: settings[key] for key in ("lr", "weight_decay")}
    fitting = Fitting(run, client, run.config.training.rounds if rounds is None else rounds)
    surroundings = Surroundings(
        run.model.common_layout,
        run.model.spec.rank,
        *(1, (0,)),
        personal_layout=run.model.personal_layout,
        validated=fitting.validation is not None,
    )
    own_rate = settings.get("client_lr", run.config.training.client_lr)
    newcomer = Newcomer.set_up(surroundings, rates | {"client_lr": own_rate})
    alone = Local(run.model.common_layout, **rates)
    own = fitting.fit(newcomer, common, personal)
    alone_common, _ = fitting.fit(
        alone, first, run.no_personal()
    )  # D = C = 0: a plain LoRA of the common rank
    found = {
        "common adapter alone": fitting.measure(common, run.no_personal()),
        "own adapter on it": fitting.measure(*own),
        "training alone": fitting.measure(alone_common, run.no_personal()),
    }
    with undone_on_failure(*new):
        folder.save_client(
            run.where, run.model, name, own[0][0], own[1][0], run.task.peft_type, run.config.model.name
        )
        write_json(new[0] / "onboarding.json", found)
        folder.save_description(run.where, replace(saved, clients=[*saved.clients, name]))
    return found


def check_newcomer(run: LoadedRun, name: str) -> None:
    check_name(name, "--client")
    if name in run.saved.clients:
        raise UserError(f"{run.folder} has a client {name!r} already; a newcomer needs another name")
    check_apart([*run.saved.clients, name], "--client")
    if not METHODS[run.saved.method].two_level:
        able = " or ".join(repr(other) for other in METHODS if METHODS[other].two_level)
        raise UserError(
            f"{run.folder} was trained with {run.saved.method!r}, which has no client adapters; onboard needs a run of "
            f"{able}"
        )


def read_client(run: LoadedRun, name: str, file: Path) -> Client[Any]:
    """The newcomer's rows: a share of them held out for the comparison, and of the rest one to choose by."""
    task = run.config.task
    rows = read_rows(task, file, run.saved.labels)
    if len(rows) < MINIMUM_ROWS:
        raise UserError(f"{file}: client {name!r} has {len(rows)} rows; at least {MINIMUM_ROWS} are needed")
    data, seed = run.config.data, run.saved.seed
    return with_validation(
        task, split_client(task, name, rows, data.test_ratio, seed), data.validation_ratio, seed
    )


class Fitting:
    """A newcomer's rows, to be learned from, chosen by and measured on."""

    def __init__(self, run: LoadedRun, client: Client[Any], rounds: int) -> None:
        self.run, self.client = run, client
        self.schedule = Schedule(rounds, run.config.training.steps, seeds=(run.saved.seed,))
        self.train: Encoded = run.task.encode([client.train], training=True).to(run.device)
        self.test: Encoded = run.task.encode([client.test], training=False).to(run.device)
        self.validation: Encoded | None = None
        if client.validation:
            validation = run.task.encode([client.validation], training=False).to(run.device)
            self.validation = run.task.weighed(validation, self.train)

    def judge(self, common: Tensor, personal: Tensor) -> Tensor:
        """The losses on the validation rows, inf where a model's outputs are no numbers."""
        assert self.validation is not None
        found = self.run.task.losses(self.run.model, common, personal, self.validation, [0])
        return found.masked_fill(~torch.isfinite(found), torch.inf)

    def fit(self, method: Method, common: Tensor, personal: Tensor) -> tuple[Tensor, Tensor]:
        """As many local steps as the run's own clients had."""
        run = self.run
        size = run.config.training.batch_size
        source = batch_source(
            run.config, self.train, [self.client.name], (run.saved.seed,), size, method.draws
        )

        def loss(common: Tensor, personal: Tensor, batch: Any) -> Tensor:
            return run.task.loss(run.model, common, personal, batch)

        with track(self.schedule.rounds * self.schedule.steps, f"{method.label}: steps") as advance:

            def on_step(step: Step) -> None:
                advance(step.clients)

            rounds = train(
                method,
                loss,
                method.init(common, personal),
                source,
                self.schedule,
                device=run.device,
                on_step=on_step,
                judges=None if self.validation is None else lambda clients: self.judge,
            )
            state = deque(rounds, maxlen=1).pop().served
        if method.resizes:
            state = method.resize(state, self.judge, serving=True)
        return state.x, state.y

    def measure(self, common: Tensor, personal: Tensor) -> Scores:
        """The scores on the rows held out."""
        answers = self.run.task.predict(self.run.model, common, personal, self.test, final=True)[0]
        scores = self.run.task.score(answers, self.client.test)
        return {metric: finite(value) for metric, value in scores.items()}
