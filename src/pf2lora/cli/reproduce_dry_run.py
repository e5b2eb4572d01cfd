"""`pf2lora reproduce … --dry-run`: which runs there would be, what is missing for them, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table

from pf2lora.cli.dry_run import NOTHING, end, in_words
from pf2lora.cli.text import safe
from pf2lora.errors import UserError, one_line

if TYPE_CHECKING:
    from pf2lora.reproduce.preset import Preset, Run
    from pf2lora.reproduce.regret.runs import Plan
    from pf2lora.reproduce.regret.tasks import BenchmarkTask
    from pf2lora.reproduce.regret.variants import Variant
    from pf2lora.run.config import Config

COUNTED = "counted, in seconds"
DONE = "there already"


def show_preset(preset: Preset, folder: Path, *, grid: bool, force: bool) -> None:
    """A line for each run of a preset: what it is, whether it is there, how long it would take here; what is missing is
    told at the end, and is exit code 2."""
    from pf2lora.cli.show import console, quiet_libraries

    quiet_libraries()
    table = a_table("run", "clients", "methods", "rounds × steps", "seeds", "time")
    missing: list[str] = []
    total = 0.0
    for run in preset.runs:
        training = run.config.training
        methods = len(training.method)
        length = f"{training.rounds} × {training.steps}"
        seconds = None
        if run.shape:
            cells = ["–", str(methods), "–", "–", COUNTED]
        else:
            try:
                state = DONE if is_done(run, folder, force) else ""
                clients, seconds = ("", None) if state else timed(preset, run, grid=grid)
            except UserError as error:
                clients, state = "", "cannot be run"
                missing.append(f"{run.name}: {error}")
            total += seconds or 0.0
            shown = state or f"about {in_words(seconds or 0.0)}"
            cells = [clients or str(run.config.data.num_clients or "–"), str(methods), length]
            cells += [str(training.seeds), shown]
        table.add_row(safe(run.name), *cells)
    console.print(f"[bold]{safe(preset.title)}[/bold], into {safe(str(folder))}", soft_wrap=True)
    console.print(table)
    finish(total, missing)


def timed(preset: Preset, run: Run, *, grid: bool) -> tuple[str, float]:
    """How many clients a run has and how long it takes: its parts are loaded and a few steps are timed."""
    from pf2lora.run.config import with_found_model
    from pf2lora.run.dry_run import plan, problems
    from pf2lora.run.workload import load_workload

    config = with_found_model(run.config)
    found = list(problems(config))
    if found:
        raise UserError("; ".join(found))
    workload = load_workload(config)
    planned = plan(config, workload)
    seconds = sum(m.training_seconds + m.evaluation_seconds for m in planned.methods)
    if grid and preset.grid is not None:  # each method tries twice the grid, with one seed
        seconds += seconds / config.training.seeds * 2 * len(preset.grid.values)
    return str(len(workload.clients)), seconds


def is_done(run: Run, folder: Path, force: bool) -> bool:
    """Whether the folder has the run's result; one of other settings is an error."""
    from pf2lora.reproduce.running import finished
    from pf2lora.run.result import FILE

    return not force and finished(folder / run.name / FILE, run.config) is not None


# --- the benchmark of all methods --------------------------------------------------------------------------


def show_regret(
    plan: Plan, todo: Sequence[tuple[BenchmarkTask, Variant]], left_out: Sequence[str], out: Path
) -> None:
    """A line for each task: how many runs are left, and how long they would take here, by one variant that is timed."""
    from pf2lora.cli.show import console
    from pf2lora.reproduce.regret import records
    from pf2lora.reproduce.regret.runs import check_same

    plan.check()
    file = out / records.FILE
    runs = records.read([file]) if file.exists() else {}
    table = a_table("task", "runs", "done", "clients", "rounds × steps", "seeds", "time")
    total, missing = 0.0, [f"left out: {line}" for line in left_out]
    for name in dict.fromkeys(task.name for task, _ in todo):
        own = [(task, variant) for task, variant in todo if task.name == name]
        for task, variant in own:
            check_same(runs.get((name, variant.name)), plan.config(task, variant), plan, file)
        left = [pair for pair in own if (name, pair[1].name) not in runs]
        task, variant = own[0]
        config = plan.config(task, variant)
        clients, seconds = "–", 0.0
        try:
            if left:
                with TemporaryDirectory() as work:  # a task's client files are made to time it; nothing stays
                    clients, seconds = timed_task(replace(plan, work=Path(work)), left)
        except UserError as error:
            missing.append(f"{name}: {error}")
        total += seconds
        length = f"{config.training.rounds} × {config.training.steps}"
        cells = [str(len(own)), str(len(own) - len(left)), clients, length, str(plan.seeds)]
        table.add_row(name, *cells, f"about {in_words(seconds)}" if seconds else "–")
    further = f", at most {plan.further} more outward" if plan.further else ""
    tried = f"{plan.tries} rates tried for each{further}"
    console.print(f"[bold]{len(todo)} runs[/bold], {tried}, into {safe(str(out))}")
    console.print(table)
    finish(total, missing)


def timed_task(plan: Plan, left: Sequence[tuple[BenchmarkTask, Variant]]) -> tuple[str, float]:
    """How many clients a task has and how long the runs that are left on it take, with all their tries: the steps of
    one variant are timed, and every run takes as long as its rows do."""
    from pf2lora.reproduce.regret.runs import config_of_tries
    from pf2lora.run.cadence import rows_of
    from pf2lora.run.dry_run import method_plan
    from pf2lora.run.work import work_of_rounds
    from pf2lora.run.workload import load_workload

    task, variant = left[0]
    task.write_files(plan.data_dir, plan.work)
    workload = load_workload(plan.config(task, variant))
    first = variant.method
    training = workload.config.training
    steps = method_plan(workload, first).step_seconds * training.steps / training.seeds
    per_row = steps / rows_of(workload, first).steps

    def seconds(config: Config, method: str) -> float:
        rows = sum(work_of_rounds(replace(workload, config=config), method))
        return per_row * rows * config.training.seeds

    total = 0.0
    for of_task, one in left:
        config = plan.config(of_task, one)
        total += seconds(config, one.method)
        if one.tuned and plan.tries > 1:
            total += (plan.tries + plan.further) * seconds(config_of_tries(config), one.method)
    return str(len(workload.clients)), total


# --- what both print ---------------------------------------------------------------------------------------


def a_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


def finish(total: float, missing: Sequence[str]) -> None:
    """The sum, and what is missing."""
    end(f"all of it: about {in_words(total)}; {NOTHING}" if total else NOTHING)
    for line in missing:
        typer.echo(f"pf2lora: {one_line(line)}", err=True)
    if missing:
        raise typer.Exit(2)
