"""Finished runs, a line of JSON each: appended as they end, read again to go on, merged from several machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pf2lora.atomic import make_folder, write_text
from pf2lora.errors import UserError
from pf2lora.parsing import json_value, read_text
from pf2lora.run.decode import decode
from pf2lora.run.result import OverClients

FILE = "regret.jsonl"
PLACES = {"model": ("device",), "data": ("data_dir", "clients", "test", "validation")}
"""Settings that say where things are on one machine: another may have them elsewhere."""


@dataclass(frozen=True)
class Try:
    """Rates with the mean validation loss of what the clients deploy; None where the run diverged. `outward`: they lie
    beyond those that everybody tries, whose best was at an end."""

    rates: dict[str, float]
    loss: float | None
    outward: bool = False


@dataclass(frozen=True)
class SeedScores:
    """Test scores of one seed by metric: at each point of the round, and of each candidate for deployment."""

    seed: int
    points: dict[str, dict[str, OverClients]]
    candidates: dict[str, dict[str, OverClients]]


@dataclass(frozen=True)
class Run:
    """A variant on a task: what was asked for, the rates that were tried and chosen, and the scores.

    `settings` are the run's tables as asked for, before rates were chosen. A run that diverged has no scores. A variant
    that is never tuned has no tries. `outward` is how many tries it may have had beyond the first ones.
    """

    task: str
    variant: str
    base_model: str
    settings: dict[str, Any]
    seeds: list[int]
    tries: list[Try]
    rates: dict[str, float]
    clients: list[str]
    scores: list[SeedScores]
    diverged: str
    seconds: float
    created: str
    machine: dict[str, Any]
    versions: dict[str, str]
    outward: int = 0  # stored runs of before there were such tries do not say
    trivial: float | None = None  # the mean score of an answer that looks at no text; earlier runs do not say

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.variant

    @property
    def first_tries(self) -> int:
        """How many rates it tried whatever came of them."""
        return sum(not tried.outward for tried in self.tries)

    @property
    def end(self) -> str:
        """`↑` where the chosen rates are the largest of those tried, `↓` where they are the smallest: better ones may
        lie beyond."""
        tried = [t.rates["lr"] for t in self.tries]
        if len(tried) < 2:
            return ""
        return {max(tried): "↑", min(tried): "↓"}.get(self.rates["lr"], "")

    def conditions(self) -> dict[str, Any]:
        """What every variant on a task must have alike, to be compared; one that is never tuned has no tries."""
        training = self.settings["training"]
        shared = {name: training[name] for name in ("rounds", "steps", "batch_size")}
        precision = self.settings["model"]["precision"]
        tries = {"tries": self.first_tries} if self.tries else {}
        seeds = {"seeds": self.seeds}
        return {"base model": self.base_model, "precision": precision} | seeds | tries | shared


Runs = dict[tuple[str, str], Run]


def asked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config's tables without what differs between machines."""
    kept = {
        table: {name: value for name, value in values.items() if name not in PLACES.get(table, ())}
        for table, values in settings.items()
        if table != "output"
    }
    kept["model"]["name"] = Path(kept["model"]["name"]).name
    return kept


def write(runs: Iterable[Run], folder: Path) -> Path:
    """The file of finished runs, whole at every moment."""
    file = folder / FILE
    make_folder(folder)
    lines = (json.dumps(asdict(run), ensure_ascii=False, allow_nan=False) + "\n" for run in runs)
    write_text(file, "".join(lines))
    return file


def read(files: Sequence[Path]) -> Runs:
    """The runs of all files; the same line twice is one run, two different ones of the same are an error."""
    found: Runs = {}
    whence: dict[tuple[str, str], Path] = {}
    for file in files:
        for run in _lines(file):
            if found.setdefault(run.key, run) != run:
                both = f"{whence[run.key]} and {file}" if whence[run.key] != file else str(file)
                raise UserError(f"{both}: two different runs of {run.variant!r} on {run.task!r}; remove one")
            whence.setdefault(run.key, file)
    check_alike(found.values())
    return found


def check_alike(runs: Iterable[Run]) -> None:
    """Refuse to compare runs of one task that were made under different conditions."""
    first: dict[tuple[str, str], Run] = {}
    for run in runs:
        for name, ours in run.conditions().items():
            other = first.setdefault((run.task, name), run)
            theirs = other.conditions()[name]
            if ours != theirs:
                raise UserError(
                    f"{run.task!r}: {other.variant!r} was run with {name} {theirs}, {run.variant!r} with {ours}; "
                    f"such runs are not compared"
                )


def _lines(file: Path) -> list[Run]:
    found = []
    for number, line in enumerate(read_text(file).removesuffix("\n").split("\n"), 1):
        where = f"{file}, line {number}"
        found.append(decode(Run, json_value(line, where), where))
    return found
