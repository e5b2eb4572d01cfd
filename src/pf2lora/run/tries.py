"""Tries: one method with several values of its numbers, judged by validation rows alone.

Tries that differ by numbers of which clients of a pass may have their own (`Method.per_client`) are trained side by
side, as further clients of the same passes, like the seeds of a run; the others one after the other.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pf2lora.atomic import make_folder, write_json
from pf2lora.core.failures import ran_out
from pf2lora.core.method import Method
from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.room import NoRoom
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.parsing import read_json
from pf2lora.run import trial as trials
from pf2lora.run.cadence import rounds_to_evaluate
from pf2lora.run.config import Config, difference, from_dict, merged, place_of, to_dict
from pf2lora.run.events import Event, Progress
from pf2lora.run.fitting import fitted
from pf2lora.run.progress import track
from pf2lora.run.result import SeedRun
from pf2lora.run.set_up import Trial, set_up
from pf2lora.run.work import Meter
from pf2lora.run.workload import Workload
from pf2lora.tasks.answering import telling_rows

Rates = dict[str, Any]
"""Values of a method's own fields, or of the run's settings, by name."""

Judged = Callable[[SeedRun], float | None]
"""How good a finished trial is by its validation rows, the lower the better; None where that is no number."""


@dataclass(frozen=True)
class Try:
    """What was tried, and how well it did, the lower the better; None where the training broke off, and why."""

    rates: Rates
    score: float | None
    failed: str = ""
    metrics: dict[str, float | None] | None = None  # on validation rows, the mean over clients and seeds
    seconds: float | None = None


@dataclass(frozen=True)
class Search:
    """All tries of a method, and the best one's rates."""

    method: str
    tries: list[Try]

    @property
    def best(self) -> Try | None:
        """The try with the lowest score; the first of equal ones."""
        finite = [t for t in self.tries if t.score is not None]
        return min(finite, key=lambda t: t.score or 0.0) if finite else None

    @property
    def chosen(self) -> Rates:
        if self.best is None:
            raise UserError(f"{self.method}: the training broke off at every one of {len(self.tries)} tries")
        return self.best.rates


# --- how good ----------------------------------------------------------------------------------------------


def served_loss(run: SeedRun) -> float | None:
    """The clients' mean validation loss with what they are served after the last round."""
    return _mean(run.rounds[-1].validation_loss or ())


def deployed_loss(run: SeedRun) -> float | None:
    """The clients' mean validation loss with what each would deploy."""
    return _mean([choice.validation_loss for choice in run.choices or ()])


def _mean(losses: Sequence[float | None]) -> float | None:
    """Over clients that have validation rows."""
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if known and all(map(math.isfinite, known)) else None


def on_validation_rows(workload: Workload) -> Workload:
    """The workload with validation rows in the place of test rows, which no try gets to see, evaluated after the same
    rounds. A client without any has a row of its training there, whose score nobody asks for."""
    if workload.validation is None:
        raise UserError(
            "tries are judged by validation rows, and there are none: give --validation files, or a --validation-ratio "
            "above 0"
        )
    clients = [replace(c, test=c.validation or c.train[:1]) for c in workload.clients]
    test = workload.task.encode([client.test for client in clients], training=False).to(workload.device)
    every = replace(workload.config.training, evaluate_every=min(rounds_to_evaluate(workload)))
    return replace(workload, clients=clients, test=test, config=replace(workload.config, training=every))


# --- configs -----------------------------------------------------------------------------------------------


def with_rates(config: Config, chosen: Mapping[str, Rates]) -> Config:
    """The config with these values for its methods: a method's own fields in its table, other settings in theirs."""
    tables: dict[str, Any] = {}
    for method, rates in chosen.items():
        kind = METHODS[method]
        table = method if method in config.methods else kind.name
        for name, value in rates.items():
            if name in kind.parameters():
                tables.setdefault("methods", {}).setdefault(table, {})[name] = value
            else:
                tables.setdefault(place_of(name) or "", {})[name] = value
    return from_dict(merged(to_dict(config), tables), "the tried values")


def groups(workload: Workload, method: str, tries: Sequence[Rates]) -> list[list[Rates]]:
    """Who is trained side by side. Every try is set up once here: what is wrong with one is said before training."""
    found: list[list[tuple[Rates, Config, Method]]] = []
    for rates in tries:
        config = with_rates(workload.config, {method: rates})
        trial = set_up(replace(workload, config=config), method, config.training.seed, compiled=False)
        trial.model.remove()
        this = rates, config, trial.method
        for group in found:
            if stackable(group[0][1:], this[1:], method):
                group.append(this)
                break
        else:
            found.append([this])
    return [[rates for rates, *_ in group] for group in found]


def stackable(one: tuple[Config, Method], other: tuple[Config, Method], name: str) -> bool:
    """Whether two tries differ by nothing but numbers of which each client may have its own. A rate of 0 is another
    computation, a word is no number of its own, and early stopping may end tries at different rounds."""
    (config, method), kind = one, METHODS[name]
    if config.training.patience is not None:
        return False

    def rest(config: Config) -> Config:
        tables = {key: dict(table) for key, table in config.methods.items()}
        for key in (name, kind.name):
            table = tables.get(key, {}).items()
            tables[key] = {k: v for k, v in table if k not in kind.per_client or isinstance(v, str)}
        return replace(config, methods=tables)

    def alike(field: str) -> bool:
        a, b = getattr(method, field), getattr(other[1], field)
        return a == b or (field in kind.per_client and all(isinstance(v, float) and v > 0 for v in (a, b)))

    return rest(config) == rest(other[0]) and all(alike(field.name) for field in fields(method))


# --- training ----------------------------------------------------------------------------------------------


def run_tries(
    workload: Workload,
    method: str,
    tries: Sequence[Rates],
    judged: Judged,
    *,
    together: bool = True,
) -> Iterator[Try]:
    """Every try, as it finishes; `together` where that is possible. One that breaks off is left out, and those beside
    it begin again without it."""
    waiting = groups(workload, method, tries)
    if not together:
        waiting = [[rates] for group in waiting for rates in group]
    while waiting:
        gc.collect()  # what was tried before, in an error's trace too, must not take memory beside the next
        group = waiting.pop(0)
        try:
            found = run_group(workload, method, group, judged)
        except Diverged as error:
            broken = group[error.federation // workload.config.training.seeds]
            found = [Try(broken, None, str(error))]
            if rest := [rates for rates in group if rates is not broken]:
                waiting.insert(0, rest)
        except (RuntimeError, NoRoom) as error:
            if not (isinstance(error, NoRoom) or ran_out(error)):
                raise
            if len(group) == 1:
                found = [Try(group[0], None, "it takes more memory than there is")]
            else:
                half = len(group) // 2
                found, waiting = [], [group[:half], group[half:], *waiting]
        yield from found


def run_group(workload: Workload, method: str, group: Sequence[Rates], judged: Judged) -> list[Try]:
    """Tries side by side, with all seeds of the run."""
    config = with_rates(workload.config, {method: group[0]})
    training = config.training
    seeds = tuple(range(training.seed, training.seed + training.seeds))
    own = tuple(own_rates(method, rates) for rates in group for _ in seeds) if len(group) > 1 else ()
    trial, _ = fitted(set_up(replace(workload, config=config), method, *seeds * len(group), own_rates=own))
    what = shown(group[0]) if len(group) == 1 else f"{len(group)} tries at once"
    try:
        with metered(trial, method, f"{trial.method.label}, {what}: rows") as meter:
            found = trials.run(
                replace(trial, measured_fully=False),
                lambda seed, record: meter.begun(record.round),
                meter.stepped,
            )
    finally:
        trial.model.remove()
    records = [outcome.record for outcome in found]
    return [
        as_try(workload, rates, records[i * len(seeds) : (i + 1) * len(seeds)], judged)
        for i, rates in enumerate(group)
    ]


@contextmanager
def metered(trial: Trial, method: str, what: str) -> Iterator[Meter]:
    """A bar that training and evaluation move; its rows are those that pass through the model."""
    moved = 0

    def tell(event: Event) -> None:
        nonlocal moved
        if isinstance(event, Progress):
            now = int(event.done * meter.total)
            advance(now - moved)
            moved = now

    meter = Meter(trial.workload, method, len(trial.seeds), tell)
    with track(int(meter.total), what) as advance, telling_rows(meter.answered):
        yield meter


def own_rates(method: str, rates: Rates) -> dict[str, float]:
    """What is a try's own among those beside it; the rest is the same for all of them."""
    numbers = {k: v for k, v in rates.items() if k in METHODS[method].per_client and not isinstance(v, str)}
    return {name: float(value) for name, value in numbers.items()}


def as_try(workload: Workload, rates: Rates, runs: Sequence[SeedRun], judged: Judged) -> Try:
    """What the seeds of a try came to."""
    losses = [loss for run in runs if (loss := judged(run)) is not None]
    validated = [k for k, client in enumerate(workload.clients) if client.validation]
    metrics: dict[str, float | None] = {}
    for name in workload.task.metrics:
        points = [run.deploy or run.served for run in runs]
        values = [point[name].per_client[k] for point in points if name in point for k in validated]
        metrics[name] = _mean(values) if None not in values else None
    failed = "" if len(losses) == len(runs) else "its validation loss is no number"
    seconds = math.fsum(run.seconds for run in runs)
    return Try(rates, None if failed else fmean(losses), failed, metrics, round(seconds, 3))


def shown(rates: Rates) -> str:
    """`lr 0.001, client_lr 0.1`."""
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in rates.items())


class Tried:
    """The tries on disk, so that a search that was interrupted goes on."""

    def __init__(self, file: Path, config: Config) -> None:
        self.file, self.config = file, to_dict(config)
        self.tries: list[dict[str, Any]] = []
        if file.is_file():
            self._read()

    def _read(self) -> None:
        try:
            content = read_json(self.file)
            config, self.tries = content["config"], list(content["tries"])
            for found in self.tries:
                Try(**{key: value for key, value in found.items() if key != "method"})
                if not isinstance(found["score"], float | None):
                    raise TypeError("a score is no number")
        except (UserError, KeyError, TypeError) as error:
            raise UserError(f"{self.file}: not a search of ours ({error}); --force replaces it") from None
        if other := difference(config, self.config):
            raise UserError(
                f"{self.file} is of other settings ({other}): name another folder with --out, or replace it with "
                f"--force"
            )

    def find(self, method: str, rates: Rates) -> Try | None:
        """What came of these rates, where they were tried before."""
        for found in self.tries:
            if found.get("method") == method and found.get("rates") == rates:
                return Try(**{key: value for key, value in found.items() if key != "method"})
        return None

    def add(self, method: str, tried: Try) -> None:
        """Keep a finished try."""
        self.tries.append({"method": method} | asdict(tried))
        make_folder(self.file.parent)
        write_json(self.file, {"config": self.config, "tries": self.tries})

    def all(
        self,
        workload: Callable[[], Workload],
        method: str,
        tries: Sequence[Rates],
        judged: Judged,
        **how: Any,
    ) -> Iterator[Try]:
        """Every try of these: those of before, then the others as they finish, which are kept at once."""
        known = [self.find(method, rates) for rates in tries]
        yield from (tried for tried in known if tried is not None)
        left = [rates for rates, tried in zip(tries, known) if tried is None]
        for tried in run_tries(workload(), method, left, judged, **how) if left else ():
            self.add(method, tried)
            yield tried
