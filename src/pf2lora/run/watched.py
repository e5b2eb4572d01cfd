"""What is noted while a trial goes on: everything that grows from round to round beside the learners' states."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pf2lora.engines.local import Round
from pf2lora.run import costs
from pf2lora.run.deploy import Deployment
from pf2lora.run.evaluation import Measured
from pf2lora.run.result import RoundRecord
from pf2lora.run.set_up import Trial
from pf2lora.run.thinning import thinned
from pf2lora.run.warnings import LeftOut, Moving, has_a_rate


class Stopper:
    """Early stopping: when the mean validation loss has not fallen for `patience` evaluations."""

    def __init__(self, patience: int | None) -> None:
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def enough(self, losses: Tensor) -> bool:
        mean = float(losses.nanmean())
        better = mean < self.best
        self.best, self.waited = (mean, 0) if better else (self.best, self.waited + 1)
        return self.patience is not None and self.waited >= self.patience


@dataclass
class Watched:
    """What is noted of a trial, for all its learners. `last` and `deployed` are of the last round, which a run that
    goes on has yet to do."""

    rounds: list[list[RoundRecord]]  # by seed, those that result.json keeps
    seconds: list[float]  # by seed, of all rounds
    left_out: list[dict[str, LeftOut]]  # by seed and client, of all rounds
    sent: list[costs.Sent]  # by seed
    stopper: Stopper
    deployment: Deployment | None  # None: nobody has validation rows
    moving: Moving | None  # None: no adapter moves by a rate that the user gave
    steps: costs.StepLedger = field(default_factory=costs.StepLedger)
    evaluation_seconds: float = 0.0
    resize_seconds: float = 0.0  # of these, before the rounds' steps
    memory: int = 0  # the most that was in use before the run was interrupted
    last: dict[str, Measured] = field(default_factory=dict)  # by candidate
    deployed: Measured | None = None

    @classmethod
    def of(cls, trial: Trial) -> Watched:
        """Nothing yet."""
        seeds, workload = trial.seeds, trial.workload
        watches = has_a_rate(trial.method, trial.model.spec.client_rank)
        return cls(
            [[] for _ in seeds],
            [0.0 for _ in seeds],
            [{} for _ in seeds],
            [costs.Sent() for _ in seeds],
            Stopper(workload.config.training.patience),
            Deployment(trial) if workload.validation is not None else None,
            Moving(trial.state.y) if watches else None,
        )

    def keep(self, s: int, record: RoundRecord) -> None:
        """Remember a round of the seed at position `s`."""
        self.rounds[s].append(record)
        self.rounds[s] = thinned(self.rounds[s], len(record.train_loss))
        self.seconds[s] += record.seconds
        for name, why in record.left_out.items():
            times, first, reason = self.left_out[s].get(name, (0, record.round, why))
            self.left_out[s][name] = LeftOut(times + 1, first, reason)

    def note(self, trial: Trial, done: Round) -> None:
        """How many numbers each participant sent, and whether its own adapter moved."""
        learners = trial.learners
        numbers = learners.everyone(trial.method.sent_numbers(done.served, done.number))
        head = trial.method.leaves(done.number).head_size
        for i in done.participants:
            self.sent[i // learners.clients].add(numbers[i], head)
        if self.moving is not None:
            self.moving.look(done.served.y, learners.places(done.participants))

    def peak_memory(self, trial: Trial) -> int | None:
        """The most memory in use, before the run was interrupted too; None where the system does not tell."""
        now = costs.peak_memory(trial.workload.device)
        return None if now is None else max(now, self.memory)
