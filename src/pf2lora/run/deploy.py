"""What each client should deploy: the candidate, and its round, with the least loss on the client's validation rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pf2lora.core.choice import gain
from pf2lora.core.method import Method, State, moved, over_tensors, put, take
from pf2lora.engines.local import Round
from pf2lora.engines.steps import local_steps, variants
from pf2lora.run.config import TrainingSettings
from pf2lora.run.evaluation import Models, finite, models_in_use
from pf2lora.run.result import Choice
from pf2lora.run.set_up import Trial
from pf2lora.run.validation import losses_and_scores, scores

SERVED, BEFORE, COMMON, PERSONAL = "served", "before_averaging", "common", "personal_steps"
CAUTION = 1.0  # standard errors by which another model must be better than the one served
PERSONAL_ROUNDS = 3  # how many rounds' worth of steps a client may try alone, unless the run says otherwise


def candidates(trial: Trial, done: Round, served: Models) -> Iterator[tuple[str, Models]]:
    """What a client could take home after a round: what it is served, what it had before the average, and, where they
    are different things, the common adapter alone."""
    names = candidate_names(trial.method)
    yield SERVED, served
    if BEFORE in names:
        yield BEFORE, models_in_use(trial, done.before, done.number, received=False)
    if COMMON in names:
        yield COMMON, Models(done.served.x, torch.zeros_like(done.served.y))


def candidate_names(method: Method | type[Method]) -> list[str]:
    """What a method's clients choose among after a round."""
    own = [COMMON] if method.two_level or method.adapts_before_use else []
    return [SERVED, *([BEFORE] if method.federated else []), *own]


def rounds_alone(training: TrainingSettings) -> int:
    """How many rounds' worth of steps a client may try alone in the end."""
    steps = training.personal_steps
    return PERSONAL_ROUNDS if steps is None else -(-steps // training.steps)


class BestCommon(NamedTuple):
    """What all clients of a seed shared after the round in which it was best, with its mean loss over them."""

    loss: float
    vector: Tensor
    round: int


class Deployment:
    """What every learner would deploy: the model it is served after the last round, unless another one (of an earlier
    round with `keep = "best"`) has a lower loss on its validation rows by more than the standard error of that, and no
    worse a score: a model grows too sure of itself, which the loss resents, while its answers still get better."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.learners = len(trial.seeds) * len(trial.workload.clients)
        self.best = Kept(self.learners)
        self.last: dict[str, Kept] = {}  # the last round's candidates
        self.chosen = Kept(self.learners)
        self.common: list[BestCommon] = []  # of each seed

    def look(self, done: Round, offered: dict[str, Models], common: Tensor | None) -> Tensor:
        """Judge a round's candidates; the losses of the served models `(learners,)` are returned. `common (seeds, P)`
        is what all clients share after it."""
        if self.trial.workload.config.training.keep == "last":
            self.best, self.common = Kept(self.learners), []
        self.last = {}
        with self.trial.share.processes.together():
            for name, models in offered.items():
                self.last[name] = Kept.holding(name, done.number, *self.judge(models), models)
                self.best.take_better(self.last[name])
        if common is not None:
            losses = self.everyones(self.last.get(COMMON, self.last[SERVED]))
            self.offer_common(common, losses, done.number)
        return self.everyones(self.last[SERVED])

    def everyones(self, kept: Kept) -> Tensor:
        """The losses of all learners, whichever process has them."""
        losses = kept.mean_losses()
        return torch.tensor(self.trial.share.everyone(losses.tolist()), dtype=losses.dtype)

    def choose(self) -> None:
        """What every learner takes: of the models that are better than the one served by more than an accident, and
        score no worse, the one with the least loss."""
        self.chosen = Kept(self.learners)
        self.chosen.take_better(self.served)
        for other in (self.best, *self.last.values()):
            better = gain(other.losses, self.served.losses, CAUTION) > 0
            if bool(better.any()):
                served, theirs = self.scores_of(self.served), self.scores_of(other)
                if served is not None and theirs is not None:
                    better &= theirs >= served
                self.chosen.take_better(other, better)

    def judge(self, models: Models) -> tuple[Tensor, Tensor | None]:
        """The losses, and the scores where they cost nothing more."""
        return losses_and_scores(self.trial, models)

    def scores_of(self, kept: Kept) -> Tensor | None:
        """The scores of these models, of which they may not have been asked yet; none where losses alone count."""
        if kept.scores is None:
            kept.scores = scores(self.trial, kept.held)
        return kept.scores

    @property
    def served(self) -> Kept:
        """The models that are served after the last round."""
        return self.last[SERVED]

    @property
    def models(self) -> Models:
        """What was chosen."""
        return self.chosen.held

    def offer_common(self, common: Tensor, losses: Tensor, number: int) -> None:
        """The common adapter is kept of the round with the least mean loss over the clients; in a private run of the
        last, as that choice would tell of their rows."""
        means = losses.view(len(self.trial.seeds), -1).nanmean(1).tolist()
        if not self.common or self.trial.schedule.privacy is not None:
            self.common = [BestCommon(math.inf, vector.clone(), number) for vector in common]
        self.common = [
            BestCommon(mean, vector.clone(), number) if mean < best.loss else best
            for mean, vector, best in zip(means, common, self.common)
        ]

    def try_personal_steps(self, done: Round, served: Models) -> Models | None:
        """Some steps alone from the last served models; each learner keeps the best of what it had on the way."""
        trial = self.trial
        state = done.served._replace(y=served.personal) if trial.method.resizes else done.served
        rounds = rounds_alone(trial.workload.config.training)
        if not trial.method.federated or rounds == 0:
            return None
        return self.try_steps(PERSONAL, done.number, alone(trial, state, done.number, rounds))

    def try_steps(self, name: str, number: int, models: Iterable[Models]) -> Models:
        """One more candidate of the last round: of `models`, each learner keeps its best."""
        tried = Kept(self.learners)
        for found in models:
            tried.take_better(Kept.holding(name, number, *self.judge(found), found))
        self.last[name] = tried
        return tried.held

    def choices(self) -> list[Choice]:
        """Every learner's choice, for its record."""
        last_round = {name: kept.mean_losses().tolist() for name, kept in self.last.items()}
        return [
            Choice(*which, finite(loss), {name: finite(losses[i]) for name, losses in last_round.items()})
            for i, (which, loss) in enumerate(zip(self.chosen.which, self.chosen.mean_losses().tolist()))
        ]


class Kept:
    """A model of every learner with its losses on the validation rows, and its score on them where that is known."""

    def __init__(self, learners: int) -> None:
        self.which: list[tuple[str, int]] = [(SERVED, 0)] * learners  # candidate and round
        self.losses = torch.full((learners, 1), torch.nan, dtype=torch.float64)
        self.scores: Tensor | None = None
        self.models: Models | None = None

    @classmethod
    def holding(cls, name: str, number: int, losses: Tensor, scores: Tensor | None, models: Models) -> Kept:
        """These very models, which their owner may write over: a thousand clients' are not copied for nothing."""
        new = cls(len(losses))
        new.which, new.losses, new.scores = [(name, number)] * len(losses), losses, scores
        new.models = models
        return new

    @property
    def held(self) -> Models:
        """The models; there are some."""
        assert self.models is not None
        return self.models

    def mean_losses(self) -> Tensor:
        """Each learner's loss; nan where it has no validation rows."""
        return self.losses.nanmean(1)

    def take_better(self, other: Kept, allowed: Tensor | None = None) -> None:
        """Whoever does better with the other's model, and is allowed to, takes it; of equal ones the first."""
        if self.models is None:
            self.which, self.losses = list(other.which), other.losses.clone()
            self.scores = None if other.scores is None else other.scores.clone()
            self.models = Models(*(t.detach().cpu().clone() for t in other.held))
            return
        better = other.mean_losses() < self.mean_losses()
        if allowed is not None:
            better &= allowed
        rows = better.nonzero().flatten()
        self.losses[rows] = other.losses[rows]
        if self.scores is not None and other.scores is not None:
            self.scores[rows] = other.scores[rows]
        elif len(rows):
            self.scores = None
        for own, new in zip(self.held, other.held):
            own[rows] = new.detach()[rows.to(new.device)].cpu()
        for i in rows.tolist():
            self.which[i] = other.which[i]


def alone(trial: Trial, state: State, number: int, rounds: int) -> Iterator[Models]:
    """The models after each of `rounds` rounds of local steps with nothing sent; they begin where `state`, that after
    round `number`, ends."""
    workload, schedule = trial.workload, trial.schedule
    learners, room = range(len(trial.source.names)), trial.room
    state = over_tensors(torch.clone, state)
    for i in range(rounds):
        done = (number + i) * schedule.steps
        for variant, alike in variants(trial.method, state, learners, number + i + 1):

            def train(together: list[int], variant: Method = variant, done: int = done) -> State:
                part = moved(take(state, together), workload.device)
                rates = [trial.rates.outside(variant, together, part.x, alone=True)] * schedule.steps
                return local_steps(
                    variant,
                    trial.F,
                    part,
                    trial.source,
                    clients=together,
                    first_step=[done] * len(together),
                    steps=schedule.steps,
                    stepper=trial.stepper,
                    rates=rates,
                )[0]

            for together, part in room.passes(alike, train):
                put(state, together, part)
        yield models_in_use(trial, state, number + i + 1, received=False)
