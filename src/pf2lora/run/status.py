"""Where a run stands, put together from its events: what a screen, plain lines and a log all show."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pf2lora.run import numbers
from pf2lora.run.events import Event, MethodEnded, MethodStarted, Progress, RoundEnded, RunStarted
from pf2lora.run.result import RoundRecord
from pf2lora.tasks.settings import Metric


@dataclass(frozen=True)
class Scores:
    """A metric after a round: its mean over clients and seeds, and the client that fares worst."""

    label: str
    metric: Metric
    round: int
    mean: float
    worst_client: str
    worst: float

    @property
    def text(self) -> str:
        return f"{self.label} {numbers.score(self.mean, self.metric)}"

    @property
    def worst_text(self) -> str:
        return f"{self.worst_client} {numbers.score(self.worst, self.metric)}"


@dataclass(frozen=True)
class Finished:
    """A method that is through."""

    label: str
    seconds: float
    scores: Scores | None
    failed: str | None


@dataclass
class Status:
    """`take` the events in their order; `clock` tells seconds."""

    clock: Callable[[], float] = time.monotonic
    run: RunStarted | None = None
    method: str = ""
    label: str = ""
    round: int = 0
    evaluating: bool = False
    loss: float | None = None
    scores: Scores | None = None
    finished: list[Finished] = field(default_factory=list)
    untrained: float = 0.0  # how much of the untrained model's answers there is

    _number: int = 0
    _seeds: Sequence[int] = ()
    _seeds_before: int = 0
    _records: list[RoundRecord] = field(default_factory=list)  # of the seeds of one round
    _done: float = 0.0  # share of these seeds' work
    _begun: tuple[float, float] | None = None  # when, and with which share done, these seeds began
    _last: float = 0.0  # when something was last heard
    _steps: int = 0
    _training: float = 0.0  # seconds in which those steps were done
    _began: float = 0.0  # when the method began
    _worked: tuple[float, float] = (0.0, 0.0)  # seconds and rows of what is over

    def take(self, event: Event) -> None:
        now = self.clock()
        if isinstance(event, RunStarted):
            self.run = event
        elif isinstance(event, MethodStarted) and self.run is not None:
            if event.method != self.method:
                self.method, self.label = event.method, self.run.methods.get(event.method, event.method)
                self._number += 1
                self._began = now
                self.loss, self.scores = None, None
            self.round, self._done, self._begun = 0, 0.0, None
            self._seeds, self._seeds_before = event.seeds, event.seeds_before
            self._steps, self._training, self._last = 0, 0.0, now
        elif isinstance(event, Progress) and not event.method:
            self.untrained = event.done
        elif isinstance(event, Progress):
            if self._begun is None:  # before the first step: a run that goes on
                self._begun = (now, event.done) if event.steps == 0 else (self._last, 0.0)
            if event.steps > self._steps:
                self._training += now - self._last
            self.round, self._done, self._steps = event.round, event.done, event.steps
            self.evaluating, self._last = event.evaluating, now
        elif isinstance(event, RoundEnded):
            self._round_ended(event)
        elif isinstance(event, MethodEnded) and self.run is not None:
            if event.method == self.method:
                self._worked = (
                    self._worked[0] + now - self._began,
                    self._worked[1] + self.run.work.get(event.method, 0.0),
                )
                label, seconds, scores = self.label, now - self._began, self.scores
            else:  # read from a checkpoint, without having begun
                label, seconds, scores = self.run.methods.get(event.method, event.method), 0.0, None
                self._number += 1
            self.finished.append(Finished(label, seconds, scores, event.failed))

    def _round_ended(self, event: RoundEnded) -> None:
        record = event.record
        if self._records and self._records[-1].round != record.round:
            self._records = []
        self._records = (
            [*self._records[-len(self._seeds) + 1 :], record] if len(self._seeds) > 1 else [record]
        )
        self.round = record.round
        known = [loss for r in self._records for loss in r.train_loss if loss is not None]
        self.loss = sum(known) / len(known) if known else self.loss
        self.scores = self._scores() or self.scores

    def _scores(self) -> Scores | None:
        """By the first metric that was measured: a headline may wait for the end."""
        assert self.run is not None
        for name, metric in self.run.metrics.items():
            tables = [r.served[name] for r in self._records if r.served and name in r.served]
            of_clients = {}
            for k, client in enumerate(self.run.clients):
                values = [value for table in tables if (value := table[k]) is not None]
                if values:
                    of_clients[client] = sum(values) / len(values)
            if of_clients:
                pick = min if metric.higher_is_better else max
                worst = pick(of_clients, key=lambda client: of_clients[client])
                mean = sum(of_clients.values()) / len(of_clients)
                return Scores(metric.label, metric, self._records[-1].round, mean, worst, of_clients[worst])
        return None

    # --- what is left -----------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Which method it is, from 1."""
        return self._number

    @property
    def share(self) -> float:
        """Of the method's work, over all its seeds."""
        if any(f.label == self.label for f in self.finished):
            return 1.0
        seeds = self.run.seeds if self.run else 1
        return min(1.0, (self._seeds_before + self._done * len(self._seeds)) / seeds)

    @property
    def share_of_all(self) -> float:
        """Of all methods' work."""
        if self.run is None or not self.run.work:
            return 0.0
        total, done = sum(self.run.work.values()), self._rows_done()
        return min(1.0, done / total) if total else 0.0

    def _rows_done(self) -> float:
        assert self.run is not None
        labels = {label: name for name, label in self.run.methods.items()}
        over = {f.label for f in self.finished} - {self.label}
        own = self.share * self.run.work.get(self.method, 0.0)
        return own + sum(self.run.work.get(labels.get(label, ""), 0.0) for label in over)

    def _seconds_per_row(self) -> float | None:
        """Of this method so far, or else of those before it."""
        assert self.run is not None
        work = self.run.work.get(self.method, 0.0)
        if self._begun is not None:
            since, share = self._begun
            rows = (self._done - share) * work * len(self._seeds) / self.run.seeds
            if rows > 0:
                return (self._last - since) / rows
        seconds, rows = self._worked
        return seconds / rows if rows > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Of the method; None where nothing tells yet."""
        per_row = self._seconds_per_row() if self.run else None
        if per_row is None or self.run is None:
            return None
        left = (1 - self.share) * self.run.work.get(self.method, 0.0) * per_row
        return max(0.0, left - (self.clock() - self._last))

    @property
    def seconds_left_of_all(self) -> float | None:
        """Of the run: methods that have not begun cost by their rows what those so far did."""
        own = self.seconds_left
        per_row = self._seconds_per_row() if self.run else None
        if own is None or per_row is None or self.run is None:
            return None
        seen = {f.label for f in self.finished} | {self.label}
        later = sum(rows for name, rows in self.run.work.items() if self.run.methods[name] not in seen)
        return own + later * per_row

    @property
    def steps_per_second(self) -> float | None:
        """Clients' steps, while it trains."""
        return self._steps / self._training if self._training > 0 else None

    # --- in words ---------------------------------------------------------------------------------------------

    @property
    def which(self) -> str:
        """`PF2LoRA, method 2 of 4`, with its seeds where they go one by one."""
        assert self.run is not None
        if not self.method:
            return "before training"
        of = f", method {self.number} of {len(self.run.methods)}" if len(self.run.methods) > 1 else ""
        some = 0 < len(self._seeds) < self.run.seeds
        seeds = f", seed {', '.join(map(str, self._seeds))}" if some else ""
        return self.label + of + seeds

    @property
    def where(self) -> str:
        """`round 12 of 20`, and whether it evaluates."""
        assert self.run is not None
        if not self.method:
            return f"the untrained model is measured, {self.untrained:.0%}"
        return f"round {self.round} of {self.run.rounds}" + (", evaluating" if self.evaluating else "")

    @property
    def rate(self) -> str:
        rate = self.steps_per_second
        return "" if rate is None else f"{rate:.3g} steps/s" if rate < 100 else f"{rate:.0f} steps/s"


def left(seconds: float | None) -> str:
    """`1 min 02 s left`, as soon as it is known."""
    return "" if seconds is None else f"{numbers.duration(round(seconds))} left"
