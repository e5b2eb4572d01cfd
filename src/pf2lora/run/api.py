"""The package from Python: one call for what `pf2lora train` and `pf2lora compare` do, and one for `pf2lora sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pf2lora import folder_lock
from pf2lora.atomic import write_json, write_text
from pf2lora.core.method import Method
from pf2lora.data import memory
from pf2lora.data.memory import Tables
from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.processes import current
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import cards, checkpoints, comparison, folder, launch, resuming, trackers
from pf2lora.run import config as configs
from pf2lora.run import sweep as sweeps
from pf2lora.run.checkpoints import Checkpoints
from pf2lora.run.comparison import Watcher, prepare
from pf2lora.run.config import Config
from pf2lora.run.events import Listener, Note, RunEnded, everybody
from pf2lora.run.plain_log import to_stderr
from pf2lora.run.progress import shown
from pf2lora.run.result import Result, RoundRecord
from pf2lora.run.sweep import Sweep
from pf2lora.run.trial import Outcome
from pf2lora.run.tries import Try
from pf2lora.run.workload import Workload
from pf2lora.tasks import TASKS
from pf2lora.tasks.settings import TaskSettings

MethodName = str | type[Method]


def federate(
    *,
    model: str | Path,
    clients: Any = (),
    method: MethodName | Sequence[MethodName] = "pf2lora",
    task: str | type[TaskSettings[Any]] = "classification",
    out: str | Path | None = None,
    force: bool = False,
    resume: bool = False,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    log: str = "auto",
    callbacks: Sequence[Listener] = (),
    **settings: Any,
) -> Result:
    """Train `method` on `clients` and return the result.

    `clients` are files, one each, or rows in memory: a table for each client, `{"north": rows, "south": rows}`, or one
    table of all with `client_column`; a table is a list of dicts, a DataFrame or a `datasets.Dataset`. `test` and
    `validation` take the same.

    `method` and `task` are names, `package.module:Class`, or classes of your own. `settings` are the command line's:
    `rounds=50`, `client_lr=0.03`, `text="review"`, `dataset="sst2"`, …; `methods` are those of single methods:
    `{"hetlora": {"penalty": 1e-3}}`. With `out`, the run folder with adapters and report is written there; one that
    holds another run is only replaced with `force`. With `resume`, a run that was interrupted there goes on, and
    ends as if it had not been; none there begins, and one that has ended is read (docs/resume.md). A method that fails
    is in the result's `failed`, unless all do: that is an error. `log` is what is shown meanwhile: "auto" (a live
    screen on a terminal, a line now and then elsewhere), "lines", "json" or "none"; each of `callbacks` is called with
    every event (docs/python.md). Under torchrun all processes call this, share the clients, and get the result; the
    first writes and shows (docs/distributed.md).
    """
    config, tables, folder = as_config("federate()", model, clients, method, task, out, methods, settings)
    return run_shown(config, folder, log=log, callbacks=callbacks, force=force, resume=resume, tables=tables)


def sweep(
    *,
    model: str | Path,
    over: Mapping[str, Sequence[Any]],
    clients: Any = (),
    method: MethodName | Sequence[MethodName] = "pf2lora",
    task: str | type[TaskSettings[Any]] = "classification",
    out: str | Path | None = None,
    force: bool = False,
    resume: bool = False,
    together: bool | None = None,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    on_try: Callable[[str, Try, int, int], None] = lambda method, tried, number, of: None,
    **settings: Any,
) -> Sweep:
    """Try every combination of the values that `over` names, `{"lr": [3e-4, 1e-3]}`, and choose by validation rows
    alone (docs/rates.md). The other arguments are those of `federate`, for which the answer's `rates` are:
    `federate(…, methods=found.rates)`. `on_try` is called with the method, each finished try, its number and that of
    all. Without `out` nothing is kept.
    """
    launch.check_alone("a sweep", "torchrun shares the clients of one run")
    config, tables, folder = as_config("sweep()", model, clients, method, task, out, methods, settings)
    with nullcontext(folder) if folder is not None else TemporaryDirectory() as place:
        return sweeps.sweep(
            configs.with_found_model(config),
            over,
            Path(place) if folder is not None else Path(place) / "sweep",
            force=force,
            resume=resume,
            together=together,
            on_try=on_try,
            tables=tables,
        )


def as_config(
    where: str,
    model: str | Path,
    clients: Any,
    method: MethodName | Sequence[MethodName],
    task: str | type[TaskSettings[Any]],
    out: str | Path | None,
    methods: Mapping[str, Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
) -> tuple[Config, Tables, Path | None]:
    """What a call of `where` describes: the config, rows that are in memory, and the folder to write."""
    if out is not None and not str(out).strip():
        raise UserError(f"{where}: out is empty: name the run folder, or leave it out")
    tables, places = taken_apart({"clients": clients, **settings})
    asked = [method] if isinstance(method, str | type) else method
    given = {
        **settings,
        "model": str(model),
        "method": [METHODS.name_of(name) for name in asked],
        "task": TASKS.name_of(task),
        **places,
        "out": "" if out is None else str(out),
        "methods": methods or {},
    }
    return configs.from_settings(given, where), tables, None if out is None else Path(out)


def taken_apart(given: Mapping[str, Any]) -> tuple[Tables, dict[str, list[str]]]:
    """Rows that are in memory, and what the config names: files, or where such rows are."""
    tables, places = {}, {}
    for part in memory.PARTS:
        value = given.get(part)
        if value is not None and memory.is_in_memory(value):
            tables[part] = memory.read_tables(part, value)
            places[part] = memory.named_places(tables[part])
        elif value is not None:
            places[part] = [str(file) for file in ([value] if isinstance(value, str | Path) else value)]
    return tables, places


class AllFailed(Diverged):
    """Every method of a run failed; `result` says why."""

    def __init__(self, result: Result) -> None:
        super().__init__(
            "; ".join(f"{result.methods[name].label}: {why}" for name, why in result.failed.items())
        )
        self.result = result


def run_shown(
    config: Config,
    out: Path | None,
    *,
    log: str = "auto",
    on_note: Callable[[str], None] = to_stderr,
    callbacks: Sequence[Listener] = (),
    force: bool = False,
    resume: bool = False,
    tables: Tables | None = None,
    on_workload: Callable[[Workload], None] = lambda workload: None,
) -> Result:
    """`run`, while `log` is shown. Several processes meet first, of which the first one shows and tells."""
    first = launch.join(config.model.device).first
    with shown(log, on_note, silent=not first) as listener:
        tell = everybody(listener, *(callbacks if first else ()))
        return run(config, out, force=force, resume=resume, tell=tell, tables=tables, on_workload=on_workload)


def run(
    config: Config,
    out: Path | None,
    *,
    force: bool = False,
    resume: bool = False,
    tell: Listener = lambda event: None,
    tables: Tables | None = None,
    on_workload: Callable[[Workload], None] = lambda workload: None,
) -> Result:
    """Run a config; with `out`, into a run folder, line by line as it happens, of which `tell` hears. `tables` are rows
    in memory; `on_workload` gets clients and model once they are loaded, in the first of several processes. Methods
    that fail are in the result's `failed`; where all do it is an error, `AllFailed`, once everything is written."""
    config = configs.with_found_model(config)

    def loaded() -> Workload:
        workload = prepare(config, tables)
        if workload.processes.first:
            on_workload(workload)
        return workload

    if out is not None:
        result = run_into(config, out, loaded, force=force, resume=resume, tell=tell)
    elif resume:
        raise UserError("a run without a folder leaves nothing to go on from: give out beside resume")
    else:
        watcher = Watcher(on_note=lambda line: tell(Note(line)), tell=tell)
        result = comparison.compare(config, watcher, loaded(), go_on=not config.training.strict)
    if len(result.failed) == len(result.methods):
        raise AllFailed(result)
    return result


def run_into(
    config: Config, out: Path, loaded: Callable[[], Workload], *, force: bool, resume: bool, tell: Listener
) -> Result:
    """Run a config into a run folder. Its workload is loaded last: a mistaken `out` should not cost a minute."""
    from pf2lora import report

    def on_note(line: str) -> None:
        tell(Note(line))

    processes = current()
    if ended := resuming.ended_for_all(processes, config, out, force=force, resume=resume):
        on_note(f"the run in {str(out)!r} has ended; nothing is left to do")
        tell(RunEnded(ended))
        return ended
    with processes.together():
        trackers.check(config.output.trackers)
    workload = loaded()
    processes = workload.processes
    again = resuming.command(config, out)
    keeper = Checkpoints(out / checkpoints.FOLDER, workload, out / "metrics.jsonl", on_note, again)
    if not processes.first:
        return run_beside(config, workload, keeper, again, resume=resume)
    with folder_lock.locked(out):
        begun = resume and resuming.begun(keeper)
        with processes.together():
            if begun:
                keeper.cut_log()
                folder.clear_half_written(out)
            else:  # only now: bad input must not cost the run that is there
                folder.claim(out, force=force or resume)
        with resuming.saying_how(again, keeper):
            write_text(out / "config.toml", configs.to_toml(config))
            result = watched_run(config, out, workload, keeper, tell)
            report.build([result], out / "report.html")
            keeper.remove()
    return result


def run_beside(
    config: Config, workload: Workload, keeper: Checkpoints, again: str, *, resume: bool
) -> Result:
    """The same run in another process than the first, which has the folder: nothing is written here."""
    if resume:
        resuming.begun(keeper)
    with workload.processes.together():
        pass
    with resuming.saying_how(again, keeper):
        watcher = Watcher(tell=lambda event: None)
        return comparison.compare(config, watcher, workload, keeper, go_on=not config.training.strict)


def watched_run(config: Config, out: Path, workload: Workload, keeper: Checkpoints, tell: Listener) -> Result:
    """The run itself: rounds, adapters and results are written as they come."""
    tracking = trackers.start(config.output.trackers, out, configs.to_dict(config), config.output.title)
    asked = {METHODS[name].name: name for name in config.training.method}

    def on_round(method: str, seed: int, record: RoundRecord) -> None:
        folder.append_metrics(out, method, seed, record)
        for tracker in tracking:
            tracker.log(trackers.round_values(method, seed, record), record.round)

    def on_outcome(method: str, seed: int, outcome: Outcome) -> None:
        if seed == config.training.seed:
            folder.save_outcome(out, workload, asked[method], seed, outcome)

    def on_result(result: Result) -> None:
        write_json(out / "result.json", result.to_dict())
        cards.write_cards(out, config, result)

    try:
        watcher = Watcher(on_round, on_outcome, lambda line: tell(Note(line)), on_result, tell)
        return comparison.compare(config, watcher, workload, keeper, go_on=not config.training.strict)
    finally:
        for tracker in tracking:
            tracker.close()
