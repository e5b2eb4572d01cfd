"""A search for a method's rates on the paper's grid, with as many tries for every method.

Every method tries all values of the grid for its rate `lr`. Then a method with a second rate tries all of them for that
one, at the best `lr`; a method with one rate tries as many more between the neighbours of its best `lr`. So each has
two times the grid, and none has more chances than another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pf2lora.atomic import make_folder, write_json
from pf2lora.engines.bad_clients import Diverged
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.parsing import read_json
from pf2lora.reproduce.preset import Grid, Run
from pf2lora.reproduce.running import Loader, Tell
from pf2lora.run.comparison import compare
from pf2lora.run.config import Config, difference, to_dict
from pf2lora.run.result import SeedRun
from pf2lora.run.workload import Workload

Rates = dict[str, float]
FILE = "grid.json"
VALIDATION = 0.1  # the share of a client's training rows that tries are judged by


@dataclass(frozen=True)
class Try:
    """A method's rates, and how well they did (the lower the better); None where the training broke off."""

    rates: Rates
    score: float | None


@dataclass(frozen=True)
class Search:
    """All tries of a method, and the best one's rates."""

    method: str
    tries: list[Try]

    @property
    def chosen(self) -> Rates:
        finite = [t for t in self.tries if t.score is not None]
        if not finite:
            raise UserError(f"{self.method}: the training broke off at every rate of the grid")
        return min(finite, key=lambda t: t.score or 0.0).rates


def grid_score(run: SeedRun) -> float | None:
    """How good a try is, the lower the better: the clients' mean validation loss, served after the last round.

    The paper does not say what it tuned on; test rows must not be it.
    """
    known = [loss for loss in run.rounds[-1].validation_loss or () if loss is not None]
    return fmean(known) if known and all(map(math.isfinite, known)) else None


def tuning_config(config: Config) -> Config:
    """What the tries of a search have in common: the first seed alone, measured at the end alone, and validation rows
    to be judged by, which the preset itself trains on."""
    rounds = config.training.rounds
    training = replace(config.training, seeds=1, evaluate_every=rounds, keep="last", personal_steps=0)
    return replace(config, training=training, data=replace(config.data, validation_ratio=VALIDATION))


def search(grid: Grid, run: Run, folder: Path, tell: Tell) -> list[Search]:
    """Every method's search, with the run's first seed. What was tried before the search was interrupted is kept."""
    config = tuning_config(run.config)
    tried = Tried(folder / FILE, config)
    workload: list[Workload] = []

    def score(method: str, rates: Rates) -> float | None:
        known = tried.find(method, rates)
        if known is not None:
            return known.score
        if not workload:
            workload.append(Loader(config).load())
        shown = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        found = attempt(config, method, rates, workload[0])
        tell(
            f"{run.label}: {METHODS[method].label} with {shown}: {'broke off' if found is None else f'{found:.4f}'}"
        )
        tried.add(method, Try(rates, found))
        return found

    return [search_method(grid, config, method, score) for method in config.training.method]


def search_method(
    grid: Grid, config: Config, method: str, score: Callable[[str, Rates], float | None]
) -> Search:
    """A method's tries: the grid for its first rate, then for its second, or between the neighbours of the best."""
    names = grid.rates_of(method)
    table = config.methods.get(method, {})
    start = {
        name: _rate(table.get(name, getattr(config.training, name, None)), method, name) for name in names
    }
    tries = [Try(rates, score(method, rates)) for v in grid.values if (rates := start | {names[0]: v})]
    best = _best(tries, start)
    if len(names) > 1:
        more = [best | {name: value} for name in names[1:] for value in grid.values]
    else:
        more = [{names[0]: value} for value in between(grid.values, best[names[0]])]
    tries += [Try(rates, score(method, rates)) for rates in more]
    return Search(method, tries)


def _rate(value: Any, method: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(
            f"[methods.{method}]: {name} must be a number for the grid to begin with, not {value!r}"
        )
    return float(value)


def _best(tries: Sequence[Try], start: Rates) -> Rates:
    finite = [t for t in tries if t.score is not None]
    return min(finite, key=lambda t: t.score or 0.0).rates if finite else start


def between(values: Sequence[float], best: float) -> list[float]:
    """As many rates as there are values, evenly spaced on a log axis between the neighbours of the best one."""
    at = list(values).index(best) if best in values else 0
    low, high = values[max(at - 1, 0)], values[min(at + 1, len(values) - 1)]
    parts = len(values) + 1
    return [float(f"{low * (high / low) ** (i / parts):.3g}") for i in range(1, parts)]


def attempt(config: Config, method: str, rates: Rates, workload: Workload) -> float | None:
    """One try: the whole run of one method with the first seed."""
    one = with_rates(config, {method: rates})
    one = replace(one, training=replace(one.training, method=(method,), strict=True))
    try:
        result = compare(one, workload=replace(workload, config=one))
    except Diverged:
        return None
    return grid_score(next(iter(result.methods.values())).runs[0])


def with_rates(config: Config, chosen: dict[str, Rates]) -> Config:
    """The config with these rates of its methods."""
    methods = {name: dict(table) for name, table in config.methods.items()}
    for method, rates in chosen.items():
        methods[method] = methods.get(method, {}) | rates
    return replace(config, methods=methods)


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
            if not all(isinstance(t["score"], float | None) for t in self.tries):
                raise TypeError("a score is no number")
        except (UserError, KeyError, TypeError) as error:
            raise UserError(f"{self.file}: not a search of ours ({error}); --force replaces it") from None
        if other := difference(config, self.config):
            raise UserError(
                f"{self.file} is of other settings ({other}): name another folder with --out, or replace it with "
                f"--force"
            )

    def find(self, method: str, rates: Rates) -> Try | None:
        found = (t for t in self.tries if t.get("method") == method and t.get("rates") == rates)
        return next((Try(rates, t["score"]) for t in found), None)

    def add(self, method: str, tried: Try) -> None:
        self.tries.append({"method": method} | asdict(tried))
        make_folder(self.file.parent)
        write_json(self.file, {"config": self.config, "tries": self.tries})
