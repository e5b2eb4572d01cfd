"""What a newcomer could deploy: a run of one client, on the frozen common adapter of a run that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from pf2lora.core.method import Method, State, StepStats, Surroundings
from pf2lora.core.randomness import participants
from pf2lora.core.rates import AUTO, alone_factor
from pf2lora.data.client import Client
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.engines.steps import Step
from pf2lora.methods import METHODS
from pf2lora.methods.local import Local
from pf2lora.methods.newcomer import Newcomer
from pf2lora.run.deploy import COMMON, PERSONAL, PERSONAL_ROUNDS, SERVED, Deployment, alone, candidates
from pf2lora.run.evaluation import Measured, Models, finite, measure, models_in_use
from pf2lora.run.progress import track
from pf2lora.run.result import Choice
from pf2lora.run.rounds import evaluation_rounds
from pf2lora.run.saved import LoadedRun
from pf2lora.run.set_up import (
    Trial,
    batch_source,
    method_in,
    method_settings,
    rate_of,
    schedule_of,
    surroundings,
)
from pf2lora.run.validation import SampledJudges
from pf2lora.run.workload import workload_of

OWN, ADAPTED, LOCAL = "own", "adapted", "local"
"""A newcomer's candidates, beside `common` and `personal_steps`: its own adapter fitted on the common one, what a
method without own adapters makes of the common one before it is used, and a plain LoRA of its own rows alone."""


@dataclass(frozen=True)
class Found:
    """What came out: the models by candidate, the one that is deployed, and what it was chosen by."""

    served: str
    models: dict[str, Models]
    chosen: Models
    choice: Choice | None


class Joining:
    """A newcomer's rows on a run's model, to learn from, choose by and be measured on."""

    def __init__(
        self,
        run: LoadedRun,
        client: Client[Any],
        rounds: int | None = None,
        client_lr: float | Literal["auto"] | None = None,
    ) -> None:
        training = run.config.training
        rounds = training.rounds if rounds is None else rounds
        self.run, self.kind = run, METHODS[run.saved.method]
        self.config = replace(run.config, training=replace(training, rounds=rounds))
        rates = schedule_of(self.config, run.saved.seed).rates
        self.schedule = Schedule(rounds, training.steps, seeds=(run.saved.seed,), rates=rates)
        self.settings = method_settings(self.config, run.saved.method)
        self.client_lr = client_lr
        if client_lr is None:
            self.client_lr = self.settings.get("client_lr", training.client_lr)
        self.workload = workload_of(self.config, run.task, [client], run.model.model, run.device)

    # --- the methods that are tried ---------------------------------------------------------------------------

    @cached_property
    def surroundings(self) -> Surroundings:
        return surroundings(
            self.config,
            self.run.saved.method,
            self.run.model.common_layout,
            clients=1,
            positions=(0,),
            personal_layout=self.run.model.personal_layout,
            validated=(self.workload.validation is not None,),
        )

    def newcomer(self) -> Newcomer:
        """The run's lower level on an x that stays."""
        return Newcomer.set_up(self.surroundings, self.rates | {"client_lr": self.client_lr})

    def local(self) -> Local:
        """All of x, by the client's own rows."""
        return Local(self.run.model.common_layout, **self.rates)

    @property
    def rates(self) -> dict[str, Any]:
        method, layout = self.run.saved.method, self.run.model.common_layout
        lr = rate_of(self.config, method, self.settings["lr"], layout)
        return {"lr": lr, "weight_decay": self.settings["weight_decay"]}

    def trial(self, method: Method, common: Tensor, personal: Tensor) -> Trial:
        """The method on this client's rows. What it begins with is the run's last common adapter, of which a method's
        own beginning may keep a part only."""
        run, size = self.run, self.config.training.batch_size
        source = batch_source(
            self.config,
            self.workload.train,
            self.workload.names,
            seeds=(run.saved.seed,),
            size=size,
            draws=method.draws,
            room=run.task.rooms.training,
        )
        state = method.init(common, personal)._replace(x=common)
        loss = partial(run.task.loss, run.model)
        return Trial(self.workload, (run.saved.seed,), run.model, method, loss, source, state, self.schedule)

    # --- its candidates -----------------------------------------------------------------------------------------

    def find(self) -> Found:
        """Every candidate, and which of them is deployed: what it would be served, unless another is clearly better on
        its validation rows (run/deploy.py)."""
        common, nothing = self.run.common()
        seed, device = self.run.saved.seed, self.run.device
        first, personal = (t.to(device) for t in self.run.model.initial(seed, self.workload.names))
        served_as, trial, rounds = self.serving(common, personal if self.kind.two_level else nothing)
        deployment = None if self.workload.validation is None else Deployment(trial)
        for done in rounds:
            served = models_in_use(trial, done.served, done.number)
            offered = {n: m for n, m in candidates(trial, done, served) if n in (SERVED, COMMON)}
            if served_as == ADAPTED and torch.equal(
                served.common, common
            ):  # it adapts while it trains, if at all
                served_as, offered = COMMON, {SERVED: served}
            if deployment is not None:
                deployment.look(done, offered, None)
        offered |= self.trained_alone(deployment, done.number, served, Models(first, nothing))
        models = {served_as if name == SERVED else name: found for name, found in offered.items()}
        if deployment is None:
            return Found(served_as, models, served, None)
        deployment.choose()
        return Found(served_as, models, deployment.models, renamed(deployment.choices()[0], served_as))

    def serving(self, common: Tensor, personal: Tensor) -> tuple[str, Trial, Iterator[Round]]:
        """What the run's method gives a client that comes now, the trial that makes it, and its rounds, as far as
        clients look at them: a fitted y; or x, adapted or as it is."""
        if self.kind.two_level:
            trial = self.trial(self.newcomer(), common, personal)
            return OWN, trial, self.fitted(trial)
        if self.kind.adapts_before_use:
            method = method_in(self.config, self.run.saved.method, self.surroundings)
            trial = self.trial(method, common, personal)
            return ADAPTED, trial, iter([standing(trial.state)])
        trial = self.trial(self.local(), common, personal)
        return COMMON, trial, iter([standing(trial.state)])

    def fitted(self, trial: Trial) -> Iterator[Round]:
        """As many local steps as the run's own clients had; the rounds after which clients are measured."""
        measured = evaluation_rounds(self.config.training)
        with self.tracked(trial.method.label) as advance:

            def on_step(step: Step) -> None:
                advance(step.clients)

            for done in train(
                trial.method,
                trial.F,
                trial.state,
                trial.source,
                self.schedule,
                device=self.run.device,
                on_step=on_step,
                stepper=trial.stepper,
                judges=None if self.workload.validation is None else SampledJudges(trial),
                room=trial.room,
            ):
                if done.number in measured:
                    yield done

    def trained_alone(
        self, deployment: Deployment | None, number: int, served: Models, first: Models
    ) -> dict[str, Models]:
        """What all of x becomes by the client's own rows: from what it is served, in a few rounds' steps, and from the
        run's beginning, in as many as the run had."""
        training = self.config.training
        few = PERSONAL_ROUNDS
        if training.personal_steps is not None:
            few = -(-training.personal_steps // self.schedule.steps)
        tries = {LOCAL: (first, 0, self.schedule.rounds)}
        if few and deployment is not None:
            tries = {PERSONAL: (served, self.schedule.rounds, few)} | tries
        found = {}
        for name, (start, after, rounds) in tries.items():
            trial = self.trial(self.local(), *(t.to(self.run.device) for t in start))
            trial = replace(trial, schedule=replace(trial.schedule, alone=self.slower[name]))
            label = "training alone" if name == LOCAL else "steps alone from there"
            with self.tracked(label, rounds) as advance:
                steps = self.told(alone(trial, trial.state, after, rounds), rounds, advance)
                if deployment is not None:
                    found[name] = deployment.try_steps(name, number, steps)
                else:
                    *_, found[name] = steps
        return found

    @property
    def slower(self) -> dict[str, float]:
        """What the run's rates are multiplied by in steps alone: from the mean of its clients (a fetched run does not
        know how many there were), and from the beginning, where the rate was found for such a mean."""
        run = self.run
        own = sum(not run.joined_later(name) for name in run.saved.clients)
        averaged = participants(run.saved.seed, 1, own, self.config.training.participation) if own else [0]
        found = self.settings["lr"] == AUTO and (self.kind.federated or self.kind.pooled)
        return {PERSONAL: alone_factor(len(averaged)), LOCAL: alone_factor() if found else 1.0}

    def told(self, models: Iterator[Models], rounds: int, advance: Callable[..., None]) -> Iterator[Models]:
        """The models of those rounds that are looked at."""
        looked_at = evaluation_rounds(replace(self.config.training, rounds=rounds))
        for number, found in enumerate(models, start=1):
            advance(self.schedule.steps)
            if number == rounds or (number in looked_at and self.config.training.keep == "best"):
                yield found

    def tracked(self, label: str, rounds: int | None = None) -> Any:
        return track((rounds or self.schedule.rounds) * self.schedule.steps, f"{label}: steps")

    # --- how good they are ---------------------------------------------------------------------------------------

    def measure(self, models: Models) -> Measured:
        """On the rows held out, with all that is measured in the end."""
        trial = self.trial(self.local(), *self.run.common())
        return measure(trial, models, final=True)


def standing(state: State) -> Round:
    """A round in which nothing was trained."""
    nothing = torch.empty(0)
    return Round(0, [0], StepStats(nothing), state, state, nothing, 0.0)


def renamed(choice: Choice, served: str) -> Choice:
    """A choice in the newcomer's words: what it is served has a name of its own."""

    def name(candidate: str) -> str:
        return served if candidate == SERVED else candidate

    losses = {name(candidate): loss for candidate, loss in choice.last_round.items()}
    return replace(choice, candidate=name(choice.candidate), last_round=losses)


def scores_of(found: Measured) -> dict[str, float | None]:
    """One client's scores by metric."""
    return {metric: finite(values[0]) for metric, values in found.scores.items()}
