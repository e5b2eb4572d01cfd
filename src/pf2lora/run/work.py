"""How much a method has to do, round by round, and how far it has got: what a bar shows."""

from __future__ import annotations

from collections.abc import Callable

from pf2lora.methods import METHODS
from pf2lora.run.cadence import rounds_to_evaluate, rows_of, step_rows
from pf2lora.run.events import Listener, Progress
from pf2lora.run.workload import Workload


def work_of_rounds(workload: Workload, method: str) -> list[float]:
    """The rows of each round of one seed: about, so that a bar moves evenly."""
    counted = rows_of(workload, method)
    found = [counted.steps, *[counted.steps + counted.resizing] * (workload.config.training.rounds - 1)]
    for number in rounds_to_evaluate(workload):
        found[number - 1] += counted.evaluation
    found[-1] += counted.end + counted.alone
    return found


class Meter:
    """How far a trial has got, told with every step and every batch of answers. What a round takes is an estimate: at
    its end the meter stands where it should."""

    def __init__(self, workload: Workload, method: str, seeds: int, tell: Listener) -> None:
        self.rounds = [seeds * rows for rows in work_of_rounds(workload, method)]
        pooled = len(workload.clients) if METHODS[method].pooled else 1  # one learner has everybody's batches
        self.step_rows = step_rows(workload.config, method) * pooled
        self.total = sum(self.rounds)
        self.before = self.inside = 0.0  # rows of the rounds that are over, and of this one
        self.round, self.steps = 1, 0
        self.method, self.tell = METHODS[method].name, tell

    def begun(self, rounds: int) -> None:
        """So many rounds are over."""
        self.round, self.inside = rounds + 1, 0.0
        self.before = sum(self.rounds[:rounds])
        self.advance(0.0, evaluating=False)

    def stepped(self, learners: int) -> None:
        self.steps += learners
        self.advance(learners * self.step_rows, evaluating=False)

    def answered(self, rows: int) -> None:
        self.advance(rows, evaluating=True)

    def advance(self, rows: float, *, evaluating: bool) -> None:
        most = self.rounds[min(self.round, len(self.rounds)) - 1]
        self.inside = min(self.inside + rows, most)
        done = min(1.0, (self.before + self.inside) / self.total)
        round_ = min(self.round, len(self.rounds))
        self.tell(Progress(self.method, round_, done, self.steps, evaluating))


def before_training(workload: Workload, tell: Listener) -> Callable[[int], None]:
    """Told how many rows were answered before any method began: the untrained model's, to see scores against."""
    total, done = max(1, sum(len(client.test) for client in workload.clients)), 0

    def answered(rows: int) -> None:
        nonlocal done
        done += rows
        tell(Progress("", 0, min(1.0, done / total), 0, evaluating=True))

    return answered
