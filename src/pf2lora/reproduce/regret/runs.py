"""The runs of the benchmark: which there are, in which order, and one of them from its tries to its line."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pf2lora.engines.bad_clients import Diverged
from pf2lora.errors import UserError
from pf2lora.reproduce.regret import records
from pf2lora.reproduce.regret.records import Run, Runs, SeedScores, Try
from pf2lora.reproduce.regret.tasks import EVALUATIONS, BenchmarkTask
from pf2lora.reproduce.regret.variants import FACTORS, FIRST, Variant, beyond, variants
from pf2lora.run.baselines import trivial
from pf2lora.run.comparison import Watcher, run_seeds, run_started
from pf2lora.run.config import Config, from_settings, to_dict
from pf2lora.run.made_with import machine, versions
from pf2lora.run.progress import shown
from pf2lora.run.result import POINTS, SeedRun
from pf2lora.run.set_up import first_rate
from pf2lora.run.tries import Rates, deployed_loss, on_validation_rows, run_tries
from pf2lora.run.workload import Workload, load_workload

TUNING_SEED = 1000  # of the training; it is not reported
TUNING_SHARE = 2  # a try has 1/2 of the rounds


@dataclass(frozen=True)
class Plan:
    """What is asked of all runs."""

    model: str
    generation_model: str
    data_dir: Path
    work: Path  # where client files are made
    seed: int = 0
    seeds: int = 3
    tries: int = 3
    outward: int = 2  # further tries at most, while the best is at an end
    over: Mapping[str, Any] | None = None  # settings of all runs: device, precision, rounds

    @property
    def further(self) -> int:
        """Tries outward at most: who tries nothing has no end."""
        return self.outward if self.tries > 1 else 0

    def config(self, task: BenchmarkTask, variant: Variant) -> Config:
        """The config of the reported run, with the variant's first rates."""
        settings = task.run_settings(self.data_dir, self.work) | dict(self.over or {})
        settings |= {
            "model": self.generation_model if task.generates else self.model,
            "seed": self.seed,
            "seeds": self.seeds,
            "evaluate_every": -(-settings["rounds"] // EVALUATIONS),
        }
        return from_settings(settings | variant.run_settings(), f"{task.name}, {variant.name}")

    def check(self) -> None:
        if TUNING_SEED in range(self.seed, self.seed + self.seeds):
            raise UserError(f"the rates are tuned on seed {TUNING_SEED}: report other seeds")


def order(tasks: Sequence[BenchmarkTask], chosen: Sequence[Variant]) -> list[tuple[BenchmarkTask, Variant]]:
    """Every run once: the first variants on every task, then the others."""
    found: dict[tuple[str, str], tuple[BenchmarkTask, Variant]] = {}
    for group in ([v for v in chosen if v in FIRST], [v for v in chosen if v not in FIRST]):
        for task in tasks:
            for variant in group:
                runner = variants()[variant.run_by(task.has_head)]
                found.setdefault((task.name, runner.name), (task, runner))
    return list(found.values())


def execute_all(
    plan: Plan,
    todo: Sequence[tuple[BenchmarkTask, Variant]],
    out: Path,
    *,
    seconds: float = math.inf,
    say: Callable[[str], None] = print,
) -> list[str]:
    """All runs that `out` has not, each written as soon as it is done; what could not be run is returned.

    A run is not begun if it would end after so many `seconds`, as far as the runs so far tell.
    """
    plan.check()
    file = out / records.FILE
    runs = records.read([file]) if file.exists() else {}
    for task, variant in todo:
        check_same(runs.get((task.name, variant.name)), plan.config(task, variant), plan, file)
    started, failures, current = time.monotonic(), [], Current(plan)
    for number, (task, variant) in enumerate(todo, 1):
        where = f"[{number}/{len(todo)}] {task.title}, {variant.label}"
        if (task.name, variant.name) in runs:
            say(f"{where}: done before")
            continue
        left = seconds - (time.monotonic() - started)
        if expected_seconds(runs, task.name) > left:
            say(f"{where}: not begun, {max(left, 0):.0f} s are left; the same command goes on from here")
            break
        say(f"{where} …")
        try:
            run = execute(plan, task, variant, current.workload(task, variant))
        except UserError as error:  # one that cannot be run must not cost the others
            failures.append(f"{task.name}, {variant.name}: {error}")
            say(f"{where}: failed: {error}")
            continue
        runs[run.key] = run
        records.write(runs.values(), out)
        say(f"{where}: {described(task, run)}")
    return failures


def check_same(run: Run | None, config: Config, plan: Plan, file: Path) -> None:
    """A finished run is taken as it is only if it is what is asked for now."""
    if run is None:
        return
    other = records.asked(run.settings) != records.asked(to_dict(config))
    if other or (run.tries and (run.first_tries, run.outward) != (plan.tries, plan.further)):
        raise UserError(
            f"{file}: {run.variant!r} on {run.task!r} was run with other settings; name another folder with --out"
        )


def expected_seconds(runs: Runs, task: str) -> float:
    """As long as the longest run on the same task, or else on any."""
    same = [run.seconds for run in runs.values() if run.task == task]
    return max(same or [run.seconds for run in runs.values()], default=0.0)


class Current:
    """The workload of one task at a time: its data and base model serve every variant and every try."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.task = plan, ""
        self.loaded: Workload | None = None

    def workload(self, task: BenchmarkTask, variant: Variant) -> Workload:
        if self.loaded is None or self.task != task.name:
            self.loaded = None  # before the next one takes its place in memory
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            task.write_files(self.plan.data_dir, self.plan.work)
            self.loaded, self.task = load_workload(self.plan.config(task, variant)), task.name
        return self.loaded


def execute(plan: Plan, task: BenchmarkTask, variant: Variant, workload: Workload) -> Run:
    """Choose the rates on validation rows, then train every seed with them."""
    started = time.perf_counter()
    config = plan.config(task, variant)
    lr = first_rate(replace(workload, config=config), variant.method)
    tries = tune(variant, config, lr, plan, lambda tried, rates: losses(workload, variant, tried, rates))
    scores: list[SeedScores] = []
    rates, diverged = best(tries) if tries else variant.tried_rates(lr, 1.0), ""
    try:
        runs = train(workload, variant.with_rates(config, rates))
        scores = [SeedScores(run.seed, points(run), run.candidates) for run in runs]
    except Diverged as error:
        diverged = str(error)
    return Run(
        task=task.name,
        variant=variant.name,
        base_model=Path(config.model.name).name,
        settings=to_dict(config),
        seeds=list(range(plan.seed, plan.seed + plan.seeds)),
        tries=tries,
        rates=rates,
        clients=workload.names,
        scores=scores,
        diverged=diverged,
        seconds=round(time.perf_counter() - started, 1),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(workload.device),
        versions=versions(),
        outward=plan.further if tries else 0,
        trivial=trivial_score(workload, task.metric),
    )


def trivial_score(workload: Workload, metric: str) -> float | None:
    """What the clients' most frequent labels, or never an answer, would have: who has less has learned nothing."""
    found = trivial(workload)
    return found.scores[metric].mean if found else None


def train(workload: Workload, config: Config) -> list[SeedRun]:
    """The runs of the config's one method, a seed each; rates that break one client break the run."""
    workload = replace(workload, config=strictly(config))
    (method,) = config.training.method
    with shown() as tell:
        tell(run_started(workload))
        return [found.record for found in run_seeds(workload, method, Watcher(tell=tell))]


def strictly(config: Config) -> Config:
    return replace(config, training=replace(config.training, strict=True))


# --- tuning ------------------------------------------------------------------------------------------------


def tune(
    variant: Variant,
    config: Config,
    lr: float,
    plan: Plan,
    losses: Callable[[Config, Sequence[Rates]], Sequence[float | None]],
) -> list[Try]:
    """The variant's tries around `lr`: shorter runs with a seed of their own, as many for everybody, and some more
    outward while the best is at an end. One try alone needs no run, and one that is never tuned has none. `losses` are
    those of a config's run with each of some rates."""
    if not variant.tuned:
        return []
    if plan.tries == 1:
        return [Try(variant.tried_rates(lr, 1.0), None)]
    shorter = config_of_tries(config)
    found: dict[float, Try] = {}

    def attempt(*factors: float, outward: bool) -> None:
        rates = [variant.tried_rates(lr, factor) for factor in factors]
        for factor, tried, loss in zip(factors, rates, losses(shorter, rates), strict=True):
            found[factor] = Try(rates=tried, loss=loss, outward=outward)

    attempt(*FACTORS[: plan.tries], outward=False)
    for _ in range(plan.further):
        further = beyond({factor: tried.loss for factor, tried in found.items()})
        if further is None:
            break
        attempt(further, outward=True)
    return list(found.values())


def config_of_tries(config: Config) -> Config:
    """A shorter run with a seed of its own, measured at its end."""
    rounds = -(-config.training.rounds // TUNING_SHARE)
    alone = replace(config.training, seed=TUNING_SEED, seeds=1, rounds=rounds, evaluate_every=rounds)
    return replace(config, training=alone)


def best(tries: Sequence[Try]) -> dict[str, float]:
    """The rates with the lowest loss; the first ones where no try has any."""
    known = [t for t in tries if t.loss is not None]
    return min(known, key=lambda t: t.loss or 0.0).rates if known else tries[0].rates


def losses(
    workload: Workload, variant: Variant, config: Config, tries: Sequence[Rates]
) -> list[float | None]:
    """What tries are judged by, on validation rows; None where one diverged. On an accelerator they are trained side by
    side, as `pf2lora sweep` has them."""
    alike = on_validation_rows(replace(workload, config=strictly(config)))
    together = workload.device.type != "cpu"
    found = list(run_tries(alike, variant.method, tries, deployed_loss, together=together))
    return [next(tried.score for tried in found if tried.rates == rates) for rates in tries]


# --- what a run has to say ---------------------------------------------------------------------------------


def points(run: SeedRun) -> dict[str, Any]:
    return {point: scores for point in POINTS if (scores := run.at(point)) is not None}


def described(task: BenchmarkTask, run: Run) -> str:
    """A finished run in a line."""
    rates = ", ".join(f"{name} {rate:.3g}{run.end}" for name, rate in run.rates.items())
    if run.diverged:
        return f"diverged ({run.diverged}); {rates}; {run.seconds:.0f} s"
    shown = []
    for point in run.scores[0].points:
        means = [seed.points[point][task.metric].mean for seed in run.scores]
        known = [mean for mean in means if mean is not None]
        value = f"{sum(known) / len(known):.4f}" if len(known) == len(means) else "not finite"
        shown.append(f"{value} {point.replace('_', ' ')}")
    return f"{task.metric} {', '.join(shown)}; {rates}; {run.seconds:.0f} s"
