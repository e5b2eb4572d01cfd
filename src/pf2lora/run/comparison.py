"""A run, top to bottom: every method with every seed on the same clients, one result."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pf2lora.core.failures import ran_out
from pf2lora.data.memory import PLACE, Tables
from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.processes import current
from pf2lora.engines.room import NoRoom
from pf2lora.errors import UserError, unknown
from pf2lora.methods import METHODS
from pf2lora.run import compiling
from pf2lora.run import trial as trials
from pf2lora.run.baselines import baselines
from pf2lora.run.checkpoints import Checkpoints, Finished
from pf2lora.run.config import Config, to_dict
from pf2lora.run.events import Event, Listener, MethodEnded, MethodStarted, RoundEnded, RunEnded, RunStarted
from pf2lora.run.first_notes import chosen_rate, endless_patience, of_rows
from pf2lora.run.fitting import fitted
from pf2lora.run.launch import limited
from pf2lora.run.made_with import machine, versions
from pf2lora.run.progress import shown
from pf2lora.run.result import Baseline, ClientInfo, ExampleRecord, MethodResult, Result, RoundRecord
from pf2lora.run.set_up import Trial, check_methods, schedule_of, set_up
from pf2lora.run.trial import Outcome
from pf2lora.run.work import Meter, before_training, work_of_rounds
from pf2lora.run.workload import Workload, load_workload
from pf2lora.tasks.answering import telling_rows

SAY_NOTHING = ("clients", "data", "train", "files", "")  # names of folders that tell nobody what is in them


@dataclass(frozen=True)
class Watcher:
    """What is told about a run while it goes on."""

    on_round: Callable[[str, int, RoundRecord], None] = lambda method, seed, record: None
    on_outcome: Callable[[str, int, Outcome], None] = lambda method, seed, outcome: None
    on_note: Callable[[str], None] = lambda line: None
    on_result: Callable[[Result], None] = lambda result: None  # of the methods that have finished so far
    tell: Listener | None = None  # who hears of the rest; nobody: what is shown by default, without notes

    def event(self, event: Event) -> None:
        if self.tell is not None:
            self.tell(event)


def prepare(config: Config, tables: Tables | None = None) -> Workload:
    """Data, tokens and the frozen base model, and every method set up once: what is wrong is said before training.
    `tables` are rows in memory."""
    with current().together():
        schedule_of(config, config.training.seed)
        check_validation(config)
        check_names(config)
        workload = load_workload(config, tables=tables)
    workload = limited(workload)
    with workload.processes.together():
        check_methods(workload)
    return workload


def check_names(config: Config) -> None:
    """Each method has a name of its own, and each table a method."""
    names = [METHODS[name].name for name in config.training.method]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"two methods are called {twice[0]!r}; each needs a name of its own")
    for table in config.methods:
        if table not in (*METHODS, *config.training.method, *names):
            raise unknown("method in [methods]", table, [*METHODS, *names])


def check_validation(config: Config) -> None:
    """What is chosen by validation rows cannot be asked for without them."""
    data, training = config.data, config.training
    if data.validation or data.validation_ratio != 0:
        return
    for flag, asked in (("--patience", training.patience), ("--personal-steps", training.personal_steps)):
        if asked:
            raise UserError(
                f"{flag} {asked} is judged on validation rows, and --validation-ratio 0 leaves none"
            )


def compare(
    config: Config,
    watcher: Watcher | None = None,
    workload: Workload | None = None,
    keeper: Checkpoints | None = None,
    *,
    go_on: bool = False,
) -> Result:
    """Every method with every seed; the result as docs/result.md describes it. With a `keeper`, what was done before
    the run was interrupted is not done again. A method that fails ends the run, unless it is to `go_on`: then the
    result says why it failed, beside the others."""
    watcher = watcher or Watcher()
    workload = workload or prepare(config)
    with nullcontext(watcher.tell) if watcher.tell else shown() as tell:
        return told_compare(config, replace(watcher, tell=tell), workload, keeper, go_on=go_on)


def told_compare(
    config: Config, watcher: Watcher, workload: Workload, keeper: Checkpoints | None, *, go_on: bool
) -> Result:
    """The comparison, while somebody is told."""
    watcher.event(run_started(workload))
    methods: dict[str, MethodResult] = {}
    told: set[str] = set()
    examples: dict[tuple[int, int], ExampleRecord] = {}
    tell_notes(workload, watcher, told)
    for note in (*chosen_rate(workload), *endless_patience(workload)):
        watcher.on_note(note)
    with telling_rows(before_training(workload, watcher.event)):
        references = baselines(workload)
    for asked in config.training.method:
        kind = METHODS[asked]
        methods[kind.name] = MethodResult(kind.label, [])
        try:
            for found in run_seeds(workload, asked, watcher, keeper):
                methods[kind.name].runs.append(found.record)
                tell_notes(workload, watcher, told)
                if found.record.seed == config.training.seed:
                    add_examples(examples, workload, kind.name, found)
        except Exception as error:
            reason = failure(error, alone=len(config.training.method) == 1)
            if reason is None or not go_on:
                raise
            if keeper is not None and isinstance(error, Diverged):  # it would fail again
                keeper.fail(kind.name, reason)
            methods[kind.name] = replace(methods[kind.name], failed=reason)
            watcher.on_note(f"{kind.label} failed: {reason}")
        watcher.event(MethodEnded(kind.name, methods[kind.name].failed))
        result = describe(workload, methods, list(examples.values()), references)
        watcher.on_result(result)
    watcher.event(RunEnded(result))
    return result


def run_started(workload: Workload) -> RunStarted:
    """What a run is, for those who watch it."""
    config, training = workload.config, workload.config.training
    return RunStarted(
        methods={METHODS[asked].name: METHODS[asked].label for asked in training.method},
        clients=workload.names,
        rounds=training.rounds,
        seeds=training.seeds,
        base_model=config.model.name,
        device=str(workload.device),
        metrics=dict(workload.task.metrics),
        work={
            METHODS[asked].name: training.seeds * sum(work_of_rounds(workload, asked))
            for asked in training.method
        },
    )


def failure(error: Exception, *, alone: bool) -> str | None:
    """Why a method failed, in a line; None for an error that is not of its own making. One that runs `alone` and finds
    no memory can go on when it is given some."""
    if isinstance(error, Diverged):
        return str(error)
    no_memory = isinstance(error, NoRoom) or ran_out(error)
    return "it takes more memory than there is" if no_memory and not alone else None


def tell_notes(workload: Workload, watcher: Watcher, told: set[str]) -> None:
    """What the data and the task have to say, each line once."""
    for note in of_rows(workload):
        if note not in told:
            told.add(note)
            watcher.on_note(note)


def add_examples(
    examples: dict[tuple[int, int], ExampleRecord], workload: Workload, method: str, found: Finished
) -> None:
    """A method's answers to a few rows of each client, beside those of the other methods."""
    for k, answered in enumerate(found.examples):
        for example in answered:
            entry = ExampleRecord(workload.names[k], example.prompt, list(example.references), {})
            examples.setdefault((k, example.row), entry).outputs[method] = example.output


def run_seeds(
    workload: Workload, asked: str, watcher: Watcher, keeper: Checkpoints | None = None
) -> Iterator[Finished]:
    """One method with every seed: as further clients of the same passes, which fill an accelerator better and change no
    number. One after the other where early stopping may end them at different rounds, or where memory ends."""
    training, name = workload.config.training, METHODS[asked].name
    seeds = tuple(range(training.seed, training.seed + training.seeds))
    together = [seeds] if training.patience is None else [(seed,) for seed in seeds]
    if keeper is not None:
        yield from (keeper.finished[name, seed] for seed in seeds if (name, seed) in keeper.finished)
        together = keeper.groups(name, seeds, together=training.patience is None)
        if name in keeper.failed:
            raise Diverged(keeper.failed[name])
    while together:
        if keeper is not None:
            keeper.stop_if_asked()
        gc.collect()  # what was tried before, in an error's trace too, must not take memory beside the next
        now = together.pop(0)
        watcher.event(MethodStarted(name, now, len(seeds) - len(now) - sum(map(len, together))))
        try:
            found = run_together(workload, asked, now, watcher, keeper)
        except RuntimeError as error:
            if len(now) == 1 or not ran_out(error):
                raise
            watcher.on_note(
                f"{asked}: {len(now)} seeds in one pass take more memory than there is: one by one"
            )
            together = [(seed,) for seed in now] + together
            continue
        for outcome in found:
            watcher.on_outcome(name, outcome.record.seed, outcome)
        if keeper is not None:
            keeper.finish(name, found)
        yield from (Finished(outcome.record, outcome.examples) for outcome in found)
        found[0].model.remove()
        del found


def run_together(
    workload: Workload,
    asked: str,
    seeds: tuple[int, ...],
    watcher: Watcher,
    keeper: Checkpoints | None = None,
) -> list[Outcome]:
    """One method with some seeds in the same passes, with its progress."""
    training = workload.config.training
    with workload.processes.together():
        trial, fit = fitted(set_up(workload, asked, *seeds))
    method = trial.method
    which = (
        "" if training.seeds == 1 else f", seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    )
    if seeds[0] == training.seed:
        for line in filter(None, [*method.notes(), compiling.why(trial.workload, asked, len(seeds)), fit]):
            watcher.on_note(f"{method.name}: {line}")
    meter = Meter(workload, asked, len(seeds), watcher.event)
    try:
        with telling_rows(meter.answered):
            told = partial(told_round, watcher, trial, meter, set())
            found = trials.run(trial, told, meter.stepped, keeper, meter.begun)
    except BaseException:
        trial.model.remove()
        raise
    last = found[0].record.rounds[-1].round
    if last < training.rounds:
        watcher.on_note(
            f"{method.label}{which}: stopped after round {last} of {training.rounds}: the mean validation loss did not "
            f"fall for {training.patience} evaluation{'s' if training.patience != 1 else ''}"
        )
    for outcome in found:
        what = method.label + (f", seed {outcome.record.seed}" if training.seeds > 1 else "")
        for line in method.findings(trials.second_order_shares(outcome.record.rounds)):
            watcher.on_note(f"{what}: {line}")
    return found


def told_round(
    watcher: Watcher,
    trial: Trial,
    meter: Meter,
    told: set[tuple[int, str]],
    seed: int,
    record: RoundRecord,
) -> None:
    """Pass a round's record on, with a line for each client that is left out for the first time."""
    which = f", seed {seed}" if len(trial.seeds) > 1 else ""
    for name, why in record.left_out.items():
        if (seed, name) not in told:
            told.add((seed, name))
            watcher.on_note(
                f"{trial.method.label}{which}: round {record.round} leaves client {name!r} out: {why}"
            )
    meter.begun(record.round)
    watcher.on_round(trial.method.name, seed, record)
    watcher.event(RoundEnded(trial.method.name, seed, record))


def titled(workload: Workload) -> str:
    """The data in a few words: the data set's title or the place of the files, and how many clients there are."""
    data, clients = workload.config.data, workload.clients
    count = "1 client" if len(clients) == 1 else f"{len(clients)} clients"
    known = workload.config.task.datasets.get(data.dataset or "")
    files = [Path(file) for file in data.clients if not file.startswith(PLACE)]
    source = known.title if known else place_of(files)
    return f"{source}, {count}" if source else count


def place_of(files: list[Path]) -> str:
    """What the files are called by: one file's own name, or their folder's; a name that says nothing gives way to that
    of the folder above."""
    if len(files) == 1 and "*" not in files[0].name and not files[0].is_dir():
        return files[0].name.partition(".")[0]
    folders = {(file if file.is_dir() else file.parent).resolve() for file in files}
    if len(folders) != 1:
        return ""
    folder = folders.pop()
    return next((p.name for p in (folder, *folder.parents) if p.name not in SAY_NOTHING), folder.name)


def describe(
    workload: Workload,
    methods: dict[str, MethodResult],
    examples: list[ExampleRecord],
    references: dict[str, Baseline] | None = None,
) -> Result:
    """The result of these methods on the workload."""
    config, task = workload.config, workload.task
    names = [method.label for method in methods.values()]
    what = " and ".join(names) if len(names) < 3 else f"{len(names)} methods"
    return Result(
        title=config.output.title or f"{what} on {titled(workload)}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        task=task.name,
        metric=next(iter(task.metrics)),
        metrics=dict(task.metrics),
        base_model=config.model.name,
        clients=[
            ClientInfo(c.name, len(c.train), len(c.test), task.describe(c.train), len(c.validation))
            for c in workload.clients
        ],
        config=to_dict(config),
        versions=versions(),
        machine=machine(workload.device, workload.processes.size),
        methods=methods,
        examples=examples,
        baselines=references or {},
        labels=list(task.labels),
    )
