"""What each client should deploy: the candidate, and its round, with the least loss on the client's validation rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pf2lora.core.choice import gain
from pf2lora.core.method import State, moved, over_tensors, put, take
from pf2lora.engines.local import Round, local_steps, passes
from pf2lora.engines.stepper import make_stepper
from pf2lora.run.evaluation import Models, finite, models_in_use
from pf2lora.run.result import Choice
from pf2lora.run.set_up import Trial
from pf2lora.run.validation import judge, scores

SERVED, BEFORE, COMMON, PERSONAL = "served", "before_averaging", "common", "personal_steps"
CAUTION = 1.0  # standard errors by which another model must be better than the one served
PERSONAL_ROUNDS = 3  # how many rounds' worth of steps a client may try alone, unless the run says otherwise


def candidates(trial: Trial, done: Round, served: Models) -> Iterator[tuple[str, Models]]:
    """What a client could take home after a round: what it is served, what it had before the average, and, where they
    are different things, the common adapter alone."""
    yield SERVED, served
    if trial.method.federated:
        yield BEFORE, models_in_use(trial, done.before, done.number, received=False)
    if trial.method.two_level or trial.method.adapts_before_use:
        yield COMMON, Models(done.served.x, torch.zeros_like(done.served.y))


class Deployment:
    """What every learner would deploy: the model it is served after the last round, unless another one (of an earlier
    round with `keep = "best"`) has a lower loss on its validation rows by more than the standard error of that, and no
    worse a score: a model grows too sure of itself, which the loss resents, while its answers still get better."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.learners = len(trial.seeds) * len(trial.workload.clients)
        self.judge = judge(trial, range(self.learners), trial.workload.validation)
        self.best = Kept(self.learners)
        self.common: list[tuple[float, Tensor]] = []  # each seed's best common vector, with its mean loss
        self.last_round: dict[str, list[float]] = {}

    def look(self, done: Round, offered: dict[str, Models], common: Tensor | None) -> Tensor:
        """Judge a round's candidates; the losses of the served models `(learners,)` are returned. `common (seeds, P)`
        is what all clients share after it."""
        losses = {name: self.judge(*models).cpu() for name, models in offered.items()}
        found = {name: scores(self.trial, models) for name, models in offered.items()}
        self.last_round = {name: found.nanmean(1).tolist() for name, found in losses.items()}
        if self.trial.workload.config.training.keep == "last":
            self.best, self.common = Kept(self.learners), []
        for name, models in offered.items():
            self.best.offer(name, done.number, losses[name], found[name], models)
        if common is not None:
            self.offer_common(common, losses.get(COMMON, losses[SERVED]).nanmean(1))
        self.served = Kept(self.learners)
        self.served.offer(SERVED, done.number, losses[SERVED], found[SERVED], offered[SERVED])
        return losses[SERVED].nanmean(1)

    def choose(self) -> None:
        """What is served, or the best of all where it is better by more than an accident."""
        better = gain(self.best.losses, self.served.losses, CAUTION) > 0
        better &= self.best.scores >= self.served.scores
        self.served.take(better.nonzero().flatten().tolist(), self.best)

    @property
    def models(self) -> Models:
        assert self.served.models is not None
        return self.served.models

    def offer_common(self, common: Tensor, losses: Tensor) -> None:
        """The common adapter is kept of the round with the least mean loss over the clients."""
        means = losses.view(len(self.trial.seeds), -1).nanmean(1).tolist()
        if not self.common:
            self.common = [(math.inf, vector.clone()) for vector in common]
        self.common = [
            (mean, vector.clone()) if mean < best[0] else best
            for mean, vector, best in zip(means, common, self.common)
        ]

    def try_personal_steps(self, done: Round, served: Models) -> Models | None:
        """Some steps alone from the last served models; each learner keeps the best of what it had on the way."""
        trial = self.trial
        state = done.served._replace(y=served.personal) if trial.method.resizes else done.served
        steps = trial.workload.config.training.personal_steps
        rounds = PERSONAL_ROUNDS if steps is None else -(-steps // trial.schedule.steps)
        if not trial.method.federated or rounds == 0:
            return None
        tried = Kept(self.learners)
        for models in alone(trial, state, done.number, rounds):
            tried.offer(PERSONAL, done.number, self.judge(*models).cpu(), scores(trial, models), models)
        assert tried.models is not None
        self.last_round[PERSONAL] = tried.losses.nanmean(1).tolist()
        self.best.offer(PERSONAL, done.number, tried.losses, tried.scores, tried.models)
        return tried.models

    def choices(self) -> list[Choice]:
        """Every learner's choice."""
        chosen = self.served
        return [
            Choice(
                *which, finite(loss), {name: finite(losses[i]) for name, losses in self.last_round.items()}
            )
            for i, (which, loss) in enumerate(zip(chosen.which, chosen.losses.nanmean(1).tolist()))
        ]


class Kept:
    """A model of every learner with its losses and its score on the validation rows, on the host."""

    def __init__(self, learners: int) -> None:
        self.which: list[tuple[str, int]] = [(SERVED, 0)] * learners  # candidate and round
        self.losses = torch.zeros(learners, 0, dtype=torch.float64)
        self.scores = torch.zeros(learners, dtype=torch.float64)
        self.models: Models | None = None

    def offer(self, name: str, number: int, losses: Tensor, scores: Tensor, models: Models) -> None:
        """Whoever does better with this than with what it has takes it; of equal ones the first."""
        new = Kept(len(losses))
        new.which, new.losses, new.scores = [(name, number)] * len(losses), losses, scores
        new.models = models
        if self.models is None:
            self.which, self.losses, self.scores = new.which, losses.clone(), scores.clone()
            self.models = Models(*(t.detach().cpu().clone() for t in models))
            return
        better = losses.nanmean(1) < self.losses.nanmean(1)
        self.take(better.nonzero().flatten().tolist(), new)

    def take(self, learners: list[int], other: Kept) -> None:
        """These learners take the other's models."""
        assert self.models is not None and other.models is not None
        rows = torch.tensor(learners, dtype=torch.long)
        self.losses[rows], self.scores[rows] = other.losses[rows], other.scores[rows]
        for own, new in zip(self.models, other.models):
            own[rows] = new.detach()[rows.to(new.device)].cpu()
        chosen = set(learners)
        self.which = [
            new if i in chosen else own for i, (own, new) in enumerate(zip(self.which, other.which))
        ]


def alone(trial: Trial, state: State, number: int, rounds: int) -> Iterator[Models]:
    """The models after each of `rounds` rounds of local steps with nothing sent; they begin where `state`, that after
    round `number`, ends."""
    workload, schedule = trial.workload, trial.schedule
    learners = range(len(trial.source.names))
    per_pass = schedule.clients_per_pass or len(learners)
    state = over_tensors(torch.clone, state)
    stepper = make_stepper(trial.F, workload.device, graphs=workload.config.model.graphs)
    for i in range(rounds):
        done = (number + i) * schedule.steps
        for variant, together in passes(trial.method, state, learners, per_pass):
            part, _ = local_steps(
                variant,
                trial.F,
                moved(take(state, together), workload.device),
                trial.source,
                together,
                [done] * len(together),
                schedule.steps,
                stepper=stepper,
            )
            put(state, together, part)
        yield models_in_use(trial, state, number + i + 1, received=False)
