"""A sweep: every combination of some values, tried on validation rows; the best one, ready to be used.

OUT/sweep.toml    what all tries have in common
OUT/sweep.json    every finished try, written when it finishes: a sweep that was interrupted goes on from there
OUT/sweep.csv     the same as a table
OUT/chosen.toml   the run with the best values
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from pf2lora.atomic import write_text
from pf2lora.data.memory import Tables
from pf2lora.errors import UserError, unknown
from pf2lora.folder_lock import check_unused, locked
from pf2lora.methods import METHODS
from pf2lora.run.comparison import prepare
from pf2lora.run.config import TABLES as SETTINGS_TABLES
from pf2lora.run.config import Config, place_of, settings_of, to_toml
from pf2lora.run.folder import check_free
from pf2lora.run.set_up import method_table
from pf2lora.run.tries import Rates, Search, Tried, Try, deployed_loss, on_validation_rows, with_rates
from pf2lora.run.workload import Workload, choose_device

COMMON, FILE, TABLE, CHOSEN = "sweep.toml", "sweep.json", "sweep.csv", "chosen.toml"
DEFAULT: Mapping[str, Sequence[Any]] = {"lr": (3e-4, 1e-3, 3e-3, 1e-2)}

# Settings of a run that change what is compared, or nothing that is learned; and those that only some methods have.
FIXED = (
    *("method", "seed", "seeds", "clients_per_pass", "evaluate_every", "keep", "patience", "strict"),
    *("max_bad_clients", "head", "evaluate_before", "targets", "client_bias", "client_layer"),
    *("lr", "client_lr", "weight_decay", "hypergradient_mode", "batches", "zeta_size", "rank", "client_rank"),
)


@dataclass(frozen=True)
class Sweep:
    """What came of it: a search for each method, and the config of the best values."""

    config: Config
    over: Mapping[str, Sequence[Any]]
    searches: list[Search]

    @property
    def metrics(self) -> list[str]:
        """What was measured on validation rows beside the loss, the headline first."""
        measured = (one.metrics for search in self.searches for one in search.tries if one.metrics)
        return list(next(measured, {}))

    @property
    def rates(self) -> dict[str, Rates]:
        """The best values of every method for which there are any."""
        return {s.method: s.best.rates for s in self.searches if s.best}

    @property
    def chosen(self) -> Config:
        """The run with these values."""
        return with_rates(self.config, self.rates)

    def at_an_end(self, search: Search) -> list[str]:
        """The names whose chosen value is the smallest or the largest number that was tried: a better one may lie
        outside."""
        found = []
        for name, value in search.chosen.items():
            numbers = sorted({v for t in search.tries if not isinstance(v := t.rates[name], str)})
            if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
                found.append(name)
        return found


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`lr=1e-4,3e-4` as names with their values."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        words = [word.strip() for word in values.split(",")]
        if not (name and equals and all(words)):
            raise UserError(f"--over {text!r}: give a name and its values, such as --over lr=1e-4,3e-4,1e-3")
        if name in found:
            raise UserError(f"--over names {name} twice; give all of its values at once")
        found[name] = list(dict.fromkeys(map(value_of, words)))
    return found


def value_of(word: str) -> Any:
    """A number where it is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def combinations(config: Config, over: Mapping[str, Sequence[Any]]) -> dict[str, list[Rates]]:
    """The tries of each method: all combinations of the values of those names that it has. A name that no method has,
    or that the whole run has where several methods are compared, is refused."""
    own = {method: METHODS[method].parameters() for method in config.training.method}
    for name in over:
        check_name(name, own)
    found = {}
    for method, known in own.items():
        names = [name for name in over if name in known or of_run(name)]
        if not names:
            continue
        tries = [dict(zip(names, values)) for values in product(*(over[name] for name in names))]
        found[method] = [typed(config, method, rates) for rates in tries]
    return found


def of_run(name: str) -> bool:
    """Whether it is a setting of the whole run that can be tried: one of training, or of the adapter."""
    return place_of(name) in ("training", "adapter") and name not in FIXED


def check_name(name: str, own: Mapping[str, Mapping[str, Any]]) -> None:
    if any(name in known for known in own.values()):
        return
    if not of_run(name):
        run = [n for table in ("training", "adapter") for n in settings_of(SETTINGS_TABLES[table])]
        known = [*dict.fromkeys([n for k in own.values() for n in k] + [n for n in run if of_run(n)])]
        raise unknown("name in --over", name, known)
    if len(own) > 1:
        raise UserError(f"--over {name} is a setting of all methods at once: sweep one method")


def typed(config: Config, method: str, rates: Rates) -> Rates:
    """The values as the settings have them (1 is 1.0 for a rate); one that is not allowed is an error."""
    tried = with_rates(config, {method: rates})
    known = vars(tried.adapter) | vars(tried.training) | method_table(tried, method)
    return {name: known[name] for name in rates}


def sweep(
    config: Config,
    over: Mapping[str, Sequence[Any]],
    out: Path,
    *,
    force: bool = False,
    resume: bool = False,
    together: bool | None = None,
    on_try: Callable[[str, Try, int, int], None] = lambda method, tried, number, of: None,
    on_workload: Callable[[Workload], None] = lambda workload: None,
    tables: Tables | None = None,
) -> Sweep:
    """Try every combination of the values `over` names and write what came of it into the folder `out`.

    `together` trains tries side by side where that is possible, or one after the other; None: side by side on an
    accelerator, which fills better, and one by one on a CPU, where it is no faster and each finished try is kept.
    `on_try` is told each try with its number among all; `resume` keeps those that a folder has; `tables` are rows in
    memory.
    """
    if config.privacy.on:
        raise UserError(
            "a sweep looks at the same rows in every try, which the stated ε of one run does not cover: choose rates "
            "without --dp-epsilon, on rows that need no protection"
        )
    tries = combinations(config, over)
    check_unused(out)
    claim(out, force=force, resume=resume)

    @cache
    def workload() -> Workload:
        whole = prepare(config, tables)
        on_workload(whole)
        found = on_validation_rows(whole)
        write_text(out / COMMON, to_toml(config))  # now that there is something to try
        return found

    with locked(out):
        tried = Tried(out / FILE, config)
        searches, number, total = [], 0, sum(map(len, tries.values()))
        beside = choose_device(config.model.device).type != "cpu" if together is None else together
        for method, rates in tries.items():
            found = []
            for one in tried.all(workload, method, rates, deployed_loss, together=beside):
                number += 1
                on_try(method, one, number, total)
                found.append(one)
            found.sort(key=lambda one: rates.index(one.rates))
            searches.append(Search(method, found))
        done = Sweep(config, over, searches)
        write_text(out / TABLE, table_text(done))
        if any(search.best for search in searches):
            write_text(out / CHOSEN, to_toml(replace_out(done.chosen)))
    return done


def claim(out: Path, *, force: bool, resume: bool) -> None:
    """Refuse a folder that holds something else, or a sweep that is neither to go on nor to be replaced."""
    if force and resume:
        raise UserError("--force starts anew and --resume goes on: give one of them")
    if not (out / FILE).exists():
        check_free(out, force=False)
    elif force:
        for name in (COMMON, FILE, TABLE, CHOSEN):
            (out / name).unlink(missing_ok=True)
    elif not resume:
        raise UserError(
            f"{str(out)!r} holds a sweep; --resume goes on with it (further values may be given), --force starts anew"
        )


def replace_out(config: Config) -> Config:
    """The chosen run has its own folder."""
    return replace(config, output=replace(config.output, out=""))


def again(out: Path, over: Mapping[str, Sequence[Any]]) -> str:
    """The command that goes on with a sweep."""
    listed = (f"--over {name}={','.join(map(str, values))}" for name, values in over.items())
    return f"pf2lora sweep {shlex.quote(str(out / COMMON))} {' '.join(listed)} --out {shlex.quote(str(out))} --resume"


def table_text(done: Sweep) -> str:
    """Every try as a line of csv."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["method", *done.over, "validation_loss", *done.metrics, "seconds", "chosen", "failed"])
    for search in done.searches:
        for one in search.tries:
            scores = [(one.metrics or {}).get(name) for name in done.metrics]
            values = [one.rates.get(name, "") for name in done.over]
            chosen = "yes" if one is search.best else ""
            writer.writerow([search.method, *values, one.score, *scores, one.seconds, chosen, one.failed])
    return file.getvalue()
