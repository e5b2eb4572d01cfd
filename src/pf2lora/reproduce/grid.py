"""A search for a method's rates on the paper's grid, with as many tries for every method.

Every method tries all values of the grid for its rate `lr`. Then a method with a second rate tries all of them for that
one, at the best `lr`; a method with one rate tries as many more between the neighbours of its best `lr`. So each has
two times the grid, and none has more chances than another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.reproduce.preset import Grid, Run
from pf2lora.reproduce.running import Loader, Tell
from pf2lora.run.config import Config
from pf2lora.run.tries import Rates, Search, Tried, Try, on_validation_rows, served_loss, shown
from pf2lora.run.workload import Workload

FILE = "grid.json"
VALIDATION = 0.1  # the share of a client's training rows that tries are judged by


def tuning_config(config: Config) -> Config:
    """What the tries of a search have in common: the first seed alone, measured at the end alone, and validation rows
    to be judged by, which the preset itself trains on. The paper does not say what it tuned on; test rows must not be
    it. A try with a bad client has failed."""
    rounds = config.training.rounds
    training = replace(
        config.training, seeds=1, evaluate_every=rounds, keep="last", personal_steps=0, strict=True
    )
    return replace(config, training=training, data=replace(config.data, validation_ratio=VALIDATION))


def search(grid: Grid, run: Run, folder: Path, tell: Tell) -> list[Search]:
    """Every method's search, with the run's first seed. What was tried before the search was interrupted is kept."""
    config = tuning_config(run.config)
    tried = Tried(folder / FILE, config)

    @cache
    def workload() -> Workload:
        return on_validation_rows(Loader(config).load())

    def scores(method: str, rates: Sequence[Rates]) -> list[Try]:
        known = len(tried.tries)
        found = []
        for one in tried.all(workload, method, rates, served_loss):
            if len(tried.tries) > known:
                how = "broke off" if one.score is None else f"{one.score:.4f}"
                tell(f"{run.label}: {METHODS[method].label} with {shown(one.rates)}: {how}")
            found.append(one)
        return found

    return [search_method(grid, config, method, scores) for method in config.training.method]


def search_method(
    grid: Grid, config: Config, method: str, scores: Callable[[str, Sequence[Rates]], list[Try]]
) -> Search:
    """A method's tries: the grid for its first rate, then for its second, or between the neighbours of the best."""
    names = grid.rates_of(method)
    table = config.methods.get(method, {})
    start = {
        name: _rate(table.get(name, getattr(config.training, name, None)), method, name) for name in names
    }
    first = scores(method, [start | {names[0]: value} for value in grid.values])
    best = (Search(method, first).best or Try(start, None)).rates
    if len(names) > 1:
        more = [best | {name: value} for name in names[1:] for value in grid.values]
    else:
        more = [{names[0]: value} for value in between(grid.values, best[names[0]])]
    return Search(method, first + scores(method, more))


def _rate(value: Any, method: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(
            f"[methods.{method}]: {name} must be a number for the grid to begin with, not {value!r}"
        )
    return float(value)


def between(values: Sequence[float], best: float) -> list[float]:
    """As many rates as there are values, evenly spaced on a log axis between the neighbours of the best one."""
    at = list(values).index(best) if best in values else 0
    low, high = values[max(at - 1, 0)], values[min(at + 1, len(values) - 1)]
    parts = len(values) + 1
    return [float(f"{low * (high / low) ** (i / parts):.3g}") for i in range(1, parts)]
