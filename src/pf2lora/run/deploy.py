"""What each client should deploy: the candidate, and its round, with the least loss on the client's validation rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pf2lora.core.method import State, moved, over_tensors, put, take
from pf2lora.engines.local import Round, local_steps, passes
from pf2lora.engines.stepper import make_stepper
from pf2lora.run.evaluation import Models, models_in_use
from pf2lora.run.result import Choice
from pf2lora.run.set_up import Trial
from pf2lora.run.validation import judge

SERVED, BEFORE, COMMON, PERSONAL = "served", "before_averaging", "common", "personal_steps"
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
    """The best model of every learner so far, by validation loss; of equal ones the first. With `keep = "last"` only
    the last round's are looked at."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.learners = len(trial.seeds) * len(trial.workload.clients)
        self.judge = judge(trial, range(self.learners), trial.workload.validation)
        self.loss: list[float] = [math.inf] * self.learners
        self.chosen: list[tuple[str, int]] = [(SERVED, 0)] * self.learners
        self.models: Models | None = None
        self.common: list[tuple[float, Tensor]] = []  # each seed's best common vector, with its mean loss
        self.last_round: dict[str, list[float]] = {}

    def look(self, done: Round, offered: dict[str, Models], common: Tensor | None, *, last: bool) -> Tensor:
        """Judge a round's candidates; the losses of the served models `(learners,)` are returned. `common (seeds, P)`
        is what all clients share after it."""
        losses = {name: self.judge(*models).cpu() for name, models in offered.items()}
        self.last_round = {name: found.tolist() for name, found in losses.items()}
        if last or self.trial.workload.config.training.keep == "best":
            for name, models in offered.items():
                self.offer(name, done.number, losses[name], models)
            if common is not None:
                self.offer_common(common, losses.get(COMMON, losses[SERVED]))
        if last:  # who has no validation rows is served the last round's model
            without = [i for i, loss in enumerate(losses[SERVED].tolist()) if math.isnan(loss)]
            self.take(without, SERVED, done.number, losses[SERVED], offered[SERVED])
        return losses[SERVED]

    def offer(self, name: str, number: int, losses: Tensor, models: Models) -> None:
        """Whoever does better with this than with its best so far takes it."""
        better = [i for i, loss in enumerate(losses.tolist()) if loss < self.loss[i]]
        self.take(better, name, number, losses, models)

    def take(self, learners: list[int], name: str, number: int, losses: Tensor, models: Models) -> None:
        if self.models is None:
            self.models = Models(*(t.detach().cpu().clone() for t in models))
        rows = torch.tensor(learners, dtype=torch.long)
        for own, new in zip(self.models, models):
            own[rows] = new.detach()[rows.to(new.device)].cpu()
        for i in learners:
            self.loss[i], self.chosen[i] = float(losses[i]), (name, number)

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
        best = Deployment(trial)
        for i, models in enumerate(alone(trial, state, done.number, rounds)):
            best.offer(PERSONAL, done.number + i + 1, best.judge(*models).cpu(), models)
        self.last_round[PERSONAL] = best.loss
        assert best.models is not None
        self.offer(PERSONAL, done.number, torch.tensor(best.loss), best.models)
        return best.models

    def choices(self) -> list[Choice]:
        """Every learner's choice."""
        return [
            Choice(
                *self.chosen[i],
                self.loss[i] if math.isfinite(self.loss[i]) else None,
                {n: loss[i] if math.isfinite(loss[i]) else None for n, loss in self.last_round.items()},
            )
            for i in range(self.learners)
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
