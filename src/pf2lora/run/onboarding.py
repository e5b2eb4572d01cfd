"""A new client joins a run that has ended: a model is chosen for it, and the run has one client more."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pf2lora.atomic import check_writable, make_folder, undone_on_failure, write_json, writing
from pf2lora.data.client import Client, check_apart, check_name
from pf2lora.data.loading import read_rows, split_client, with_validation
from pf2lora.data.split import MINIMUM_ROWS
from pf2lora.errors import CannotWrite, UserError
from pf2lora.folder_lock import locked
from pf2lora.methods import METHODS
from pf2lora.run import folder, result, snapshot
from pf2lora.run.cards import write_newcomer_card
from pf2lora.run.checkpoints import FOLDER as CHECKPOINTS
from pf2lora.run.joining import Found, Joining, scores_of
from pf2lora.run.result import ClientInfo, NewcomerRecord, Result
from pf2lora.run.saved import LoadedRun, read_description

REPORT = "report.html"


def onboard(
    run: LoadedRun,
    name: str,
    file: Path,
    rounds: int | None = None,
    *,
    test: Path | None = None,
    client_lr: float | Literal["auto"] | None = None,
    force: bool = False,
    on_note: Callable[[str], None] = lambda line: None,
) -> NewcomerRecord:
    """Fit what the newcomer could deploy on the run's common adapter, choose, and add it to the run: its adapter, and
    its record in result.json and the report. What is trained is its own; nobody else's file is touched. A newcomer of
    that name is replaced with `force` only. `test` has the rows to measure on, else a part of `file` is held out."""
    with locked(run.folder):
        # As it is now: others may have joined since the run was opened.
        run = replace(run, saved=read_description(run.where))
        check_newcomer(run, name, force=force)
        if client_lr is not None and not METHODS[run.saved.method].two_level:
            raise UserError(
                f"--client-lr is the rate of a client's own adapter, and {run.saved.method!r} has none"
            )
        paths = new_paths(run, name)
        for path in (*paths, run.where / "state", run.folder):
            check_writable(path)
        known = known_result(run, on_note)
        if run.joined_later(name):
            on_note(f"replaces {replaced(known, run, name)}")
        client = read_client(run, name, file, test)
        joining = Joining(run, client, rounds, client_lr)
        found = joining.find()
        record = record_of(joining, found)
        with together(run.folder, *paths) as aside:
            write_client(run, aside / run.where.relative_to(run.folder), record, found)
            if known is not None:
                write_result(aside, with_newcomer(known, record), run.folder, on_note)
    return record


# --- who may join ---------------------------------------------------------------------------------------------------


def check_newcomer(run: LoadedRun, name: str, *, force: bool) -> None:
    """The name is free, or a newcomer's that may be replaced; the run has ended, and has something to join."""
    check_name(name, "--client")
    if name in run.saved.clients:
        if not run.joined_later(name):
            raise UserError(
                f"{run.folder} has a client {name!r} already, which took part in the training; a newcomer needs "
                f"another name"
            )
        if not force:
            raise UserError(
                f"{run.folder} has a client {name!r} already, who joined later; --force replaces it, or give another "
                f"name"
            )
    else:
        check_apart([*run.saved.clients, name], "--client")
    if next(snapshot.newest_first(run.folder / CHECKPOINTS), None) is not None:
        raise UserError(f"{run.folder}: the run has not ended; let it go on (--resume) before clients join")
    kind = METHODS[run.saved.method]
    if not (kind.federated or kind.pooled):
        raise UserError(
            f"{run.folder} was trained with {run.saved.method!r}, where every client is alone: there is no common "
            f"adapter to join; train the newcomer by itself (pf2lora train --method local)"
        )


def read_client(run: LoadedRun, name: str, file: Path, test: Path | None = None) -> Client[Any]:
    """The newcomer's rows: some to be measured on (those of `test`, or a share held out), and of the rest some to
    choose by."""
    task, data, seed = run.config.task, run.config.data, run.saved.seed
    rows = read_rows(task, file, run.saved.labels)
    if len(rows) < MINIMUM_ROWS:
        raise UserError(f"{file}: client {name!r} has {len(rows)} rows; at least {MINIMUM_ROWS} are needed")
    if test is not None:
        client = Client(name, rows, read_rows(task, test, run.saved.labels))
    else:
        client = split_client(task, name, rows, data.test_ratio, seed)
    return with_validation(task, client, data.validation_ratio, seed)


def replaced(known: Result | None, run: LoadedRun, name: str) -> str:
    """The newcomer that goes, in words."""
    method = METHODS[run.saved.method].name
    old = [n for n in known.newcomers if (n.client.name, n.method) == (name, method)] if known else []
    if not old:
        return f"the newcomer {name!r}, of whom result.json says nothing"
    day, rows = old[0].created[:16].replace("T", " "), old[0].client.train
    return f"the newcomer {name!r} of {day}, with {rows} training rows"


# --- what is written --------------------------------------------------------------------------------------------------


def record_of(joining: Joining, found: Found) -> NewcomerRecord:
    """The newcomer as result.json has it: every candidate on its test rows."""
    workload, kind = joining.workload, joining.kind
    (client,) = workload.clients
    measured = {name: joining.measure(models) for name, models in found.models.items()}
    deployed = joining.measure(found.chosen)
    errors = {name: m.uncertainty() for name, m in (measured | {"deploy": deployed}).items()}
    return NewcomerRecord(
        client=ClientInfo(
            client.name,
            len(client.train),
            len(client.test),
            workload.task.describe(client.train),
            len(client.validation),
        ),
        method=kind.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        rounds=joining.schedule.rounds,
        served=found.served,
        choice=found.choice,
        deploy=scores_of(deployed),
        scores={name: scores_of(m) for name, m in measured.items()},
        errors={name: error.per_client[0] for name, error in errors.items() if error},
        client_lr=str(joining.client_lr) if kind.two_level else None,
    )


def new_paths(run: LoadedRun, name: str) -> tuple[Path, Path]:
    """What a newcomer's adapter is in: its PEFT folder and its state."""
    return run.where / "clients" / name, run.where / "state" / "clients" / f"{name}.safetensors"


def write_client(run: LoadedRun, where: Path, record: NewcomerRecord, found: Found) -> None:
    """The newcomer's adapter, with its record beside it, and the clients' names with its own."""
    name, saved = record.client.name, run.saved
    base, model = run.config.model.name, run.model
    folder.save_client(
        where, model, name, found.chosen.common[0], found.chosen.personal[0], run.task.peft_type, base
    )
    write_json(where / "clients" / name / folder.JOINED, asdict(record))
    write_newcomer_card(where / "clients" / name, run.config, record, run.task.metrics)
    clients = saved.clients if name in saved.clients else [*saved.clients, name]
    folder.save_description(where, replace(saved, clients=clients))


def known_result(run: LoadedRun, on_note: Callable[[str], None]) -> Result | None:
    """The run's result, to which the newcomer is added; None where there is none."""
    if not (run.folder / result.FILE).exists():
        on_note(f"{run.folder} has no {result.FILE}: the newcomer will be in no report")
        return None
    return result.load_result(run.folder)


def with_newcomer(known: Result, record: NewcomerRecord) -> Result:
    """The result with one newcomer more, in the place of its namesake."""
    key = record.client.name, record.method
    others = [n for n in known.newcomers if (n.client.name, n.method) != key]
    return replace(known, newcomers=[*others, record])


def write_result(aside: Path, known: Result, where: Path, on_note: Callable[[str], None]) -> None:
    """result.json and the report, unless somebody's own page has its name."""
    from pf2lora import report

    write_json(aside / result.FILE, known.to_dict())
    page = where / REPORT
    if not page.exists() or report.is_ours(page):
        report.build(known, aside / REPORT)
    else:
        on_note(f"{page} is no report of pf2lora and stays as it is")


@contextmanager
def together(where: Path, *new: Path) -> Iterator[Path]:
    """Files of a run folder that change at once: what is yielded is filled with them, under the names that they will
    have, and then they are renamed into place. A full disk or an error before that changes nothing. What is `new` comes
    first, and goes again where that fails: until then nothing in the run names it."""
    aside = where / folder.ASIDE
    shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
    try:
        with undone_on_failure(*new):
            yield make_folder(aside)
            files = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file()]
            # The deepest first, and last the clients' names: with them the newcomer is in the run.
            put(aside, where, sorted((f for f in files if len(f.parts) > 1), key=lambda f: -len(f.parts)))
        put(aside, where, [f for f in files if len(f.parts) == 1])
    except CannotWrite as error:  # the user knows the files by their own names
        raise CannotWrite(where, OSError(error.errno, error.reason)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put(aside: Path, where: Path, files: list[Path]) -> None:
    """Rename files into place."""
    for file in files:
        make_folder((where / file).parent)
        with writing(where / file):
            (aside / file).replace(where / file)
