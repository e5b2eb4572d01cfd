"""A run's checkpoints: when one is written, what is in it, and the run that goes on from the last whole one.

    checkpoints/000007/                     a snapshot (run/snapshot.py): where the run stands, the trial at hand
    checkpoints/finished/METHOD-SEED.json   what a finished trial came to

They are there while the run is; one that ended well has removed them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pf2lora.atomic import write_bytes
from pf2lora.core.method import State, tensors_of
from pf2lora.engines.local import After, Round
from pf2lora.errors import UserError
from pf2lora.run import snapshot, trial_state
from pf2lora.run.cadence import most_evaluations
from pf2lora.run.decode import decode
from pf2lora.run.fingerprint import (
    CannotGoOn,
    Fingerprint,
    check_rounds,
    check_same,
    fingerprint,
    rows_digests,
)
from pf2lora.run.interruption import Interrupted, Interruption
from pf2lora.run.result import SeedRun
from pf2lora.run.set_up import Trial
from pf2lora.run.snapshot import Damaged, SharedSnapshot, Snapshot
from pf2lora.run.trial import Outcome, common_vectors
from pf2lora.run.watched import Watched
from pf2lora.run.workload import Workload
from pf2lora.tasks.base import Example

FOLDER = "checkpoints"
FINISHED = "finished"
FILES = (  # what may lie in the folder, as patterns
    *(
        f"{folder}/{name}"
        for folder in ("[0-9]*", snapshot.ASIDE)
        for name in ("*.json", "*.safetensors", "clients/*.safetensors")
    ),
    f"{FINISHED}/*.json",
)
SHARE = 0.02  # of a run's time that checkpoints may take
LEAST = 10.0  # seconds of work that are worth one
SPEED = 1e8  # bytes a second, until one was written and measured


@dataclass(frozen=True)
class Finished:
    """A method that has finished with a seed: its record for result.json, and answers for the report."""

    record: SeedRun
    examples: list[list[Example]]


class Checkpoints:
    """The checkpoints of a run in `folder`. `log` is a file that grows by lines beside them, and is cut to what it had;
    `tell` gets a line for the user."""

    def __init__(
        self, folder: Path, workload: Workload, log: Path | None, tell: Callable[[str], None], go_on: str
    ) -> None:
        output = workload.config.output
        self.folder, self.workload, self.log, self.tell, self.go_on = folder, workload, log, tell, go_on
        self.every, self.keep = output.checkpoint_every, output.keep_checkpoints
        self.processes = workload.processes  # the first of them writes
        self.rows = rows_digests(workload)
        self.fingerprint = fingerprint(workload, self.rows)
        self.finished: dict[tuple[str, int], Finished] = {}
        self.digests: dict[tuple[str, int], str] = {}  # of the finished ones' files
        self.failed: dict[str, str] = {}  # methods that diverged, and why
        self.found: Snapshot | None = None  # what the run goes on from
        self.interruption = Interruption(quiet=not self.processes.first)
        self.saved_at, self.cost = time.monotonic(), 0.0
        self.round = 0  # the last one that is kept of the trial at hand

    # --- going on -------------------------------------------------------------------------------------------

    def load(self) -> bool:
        """Go on from the last whole checkpoint; False where none was ever written. Nothing is changed yet. Of several
        processes the first reads it, and tells the others."""
        if self.processes.alone:
            return self.load_here()
        told = self.processes.from_first(lambda: self.to_tell() if self.load_here() else None)
        if told is None:
            return False
        self.found = SharedSnapshot(Path(told["path"]), told["about"], told["digests"], self.processes)
        if not self.processes.first:
            self.hear(told)
        return True

    def to_tell(self) -> dict[str, Any]:
        """What the other processes have to know of the checkpoint that was read."""
        assert self.found is not None
        return {
            "path": str(self.found.path),
            "about": self.found.about,
            "digests": dict(self.found.digests),
            "finished": [[*key, finished_content(done)] for key, done in self.finished.items()],
        }

    def hear(self, told: dict[str, Any]) -> None:
        """What the first process has read."""
        self.failed = dict(told["about"]["failed"])
        self.finished = {
            (method, seed): read_content(content, FINISHED) for method, seed, content in told["finished"]
        }
        for line in told["about"]["notes"]:
            self.workload.task.note(line)

    def load_here(self) -> bool:
        damaged = []
        for path in snapshot.newest_first(self.folder):
            try:
                found = snapshot.opened(path)
                self.read(found)
            except Damaged as error:
                damaged.append(f"the checkpoint {path} is damaged: {error}")
                continue
            for line in damaged:
                self.tell(f"{line}; going on from {path.name}, the one before")
            self.found = found
            return True
        if damaged:
            raise CannotGoOn(f"{damaged[0]}, and there is no other")
        return False

    def read(self, found: Snapshot) -> None:
        """What has finished, after a look at whether this is the same run."""
        try:
            then = decode(Fingerprint, found.about["fingerprint"], snapshot.MANIFEST)
            finished = {(str(m), int(s)): str(digest) for m, s, digest in found.about["finished"]}
            reached = int(found.about["trial"]["round"]) if found.about["begun"] else 0
            notes = [str(line) for line in found.about["notes"]]
            failed = {str(method): str(why) for method, why in found.about["failed"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
            raise Damaged(f"its manifest says something else ({error})") from None
        try:
            lines = check_same(then, self.fingerprint, lambda: self.whose_rows(found))
            ended = [*(method for method, _ in finished), *failed]
            times = partial(most_evaluations, self.workload)
            check_rounds(then.settings, self.workload.config, reached, ended, times)
        except CannotGoOn as error:
            raise CannotGoOn(f"the run in {str(self.folder.parent)!r} cannot go on: {error}") from None
        self.finished = {key: self.read_finished(*key, digest) for key, digest in finished.items()}
        self.digests, self.failed = finished, failed
        for line in notes:
            self.workload.task.note(line)
        for line in lines:
            self.tell(f"going on: {line}")

    def read_finished(self, method: str, seed: int, digest: str) -> Finished:
        """What a finished trial came to, as it was written."""
        name = f"{FINISHED}/{method}-{seed}.json"
        try:
            data = (self.folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise Damaged(f"{name} is not as it was written")
            return read_content(json.loads(data), name)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError) as error:
            raise Damaged(f"{name} cannot be read ({error})") from None

    def whose_rows(self, found: Snapshot) -> str:
        """The client whose rows are others than when the checkpoint was written, where its own file tells."""
        for name, digest in zip(self.workload.names, self.rows):
            path = f"clients/{name}.safetensors"
            if path in found.digests and snapshot.unpacked(found.read(path))[1].get("rows") != digest:
                return f"those of client {name!r} have changed"
        return "the files are the same settings', and have changed"

    def cut_log(self) -> None:
        """The log as it was when the checkpoint was written; what came after is done again."""
        if self.found is None or self.log is None or not self.log.exists():
            return
        length = int(self.found.about["log"])
        if self.log.stat().st_size > length:
            os.truncate(self.log, length)

    def groups(self, method: str, seeds: Sequence[int], together: bool) -> list[tuple[int, ...]]:
        """Which seeds are still to be trained, and which of them in one pass: those that were begun so first."""
        left = [seed for seed in seeds if (method, seed) not in self.finished]
        begun = self.begun_seeds(method)
        rest = [seed for seed in left if seed not in begun]
        groups: list[tuple[int, ...]] = [(seed,) for seed in rest]
        if together and rest:
            groups = [tuple(rest)]
        return [begun, *groups] if begun else groups

    def begun_seeds(self, method: str) -> tuple[int, ...]:
        begun = self.found.about["begun"] if self.found else None
        return tuple(int(s) for s in begun["seeds"]) if begun and begun["method"] == method else ()

    def begun(self, trial: Trial, watched: Watched) -> tuple[State, After] | None:
        """Where the trial stood when the run was interrupted; None where it had not begun."""
        found, self.round = self.found, 0
        if found is None or self.begun_seeds(trial.method.name) != trial.seeds:
            return None
        self.found = None  # from now on there is a newer state
        try:
            state, after = trial_state.restore(found, trial, watched)
        except Damaged as error:
            raise CannotGoOn(f"the checkpoint {found.path} cannot be used: {error}") from None
        self.round = after.number
        self.tell(f"{trial.method.label}: going on after round {after.number} of {trial.schedule.rounds}")
        return state, after

    # --- keeping --------------------------------------------------------------------------------------------

    def after_round(self, trial: Trial, done: Round, watched: Watched) -> None:
        """A checkpoint, where one is due or the run was asked to stop."""
        told = self.processes.gather([self.interruption.number, self.due(trial, done)])
        asked = max(number for number, _ in told)
        if asked or told[0][1]:
            self.save_trial(trial, done, watched)
        if asked:
            self.interruption.number = asked
            raise self.stopped(f"{trial.method.label}: stopped after round {done.number}, which is kept")

    def due(self, trial: Trial, done: Round) -> bool:
        if self.every is not None:
            return self.every > 0 and done.number % self.every == 0
        cost = self.cost or sum(t.nbytes for t in tensors_of(done.served)) / SPEED
        return time.monotonic() - self.saved_at >= max(LEAST, cost / SHARE)

    def save_trial(self, trial: Trial, done: Round, watched: Watched) -> None:
        """A checkpoint after a round."""
        started = time.monotonic()
        shares = trial.method.federated or trial.method.pooled
        files = trial_state.files(
            trial, done, watched, common_vectors(trial, done) if shares else None, self.rows
        )
        self.save(
            {
                "begun": {"method": trial.method.name, "seeds": list(trial.seeds)},
                "trial": trial_state.summary(trial, done, watched),
            },
            files,
        )
        self.saved_at = time.monotonic()
        self.cost, self.round = self.saved_at - started, done.number

    def save(self, about: dict[str, Any], files: Iterable[tuple[str, bytes]]) -> None:
        """A checkpoint with what every one has. Of several processes the first writes it, to which the others send."""
        if not self.processes.first:
            for _ in files:
                pass
            return
        length = 0
        if self.log is not None and self.log.exists():
            with self.log.open("rb") as file:
                os.fsync(file.fileno())
                length = os.fstat(file.fileno()).st_size
        common = {
            "fingerprint": asdict(self.fingerprint),
            "finished": [[method, seed, digest] for (method, seed), digest in self.digests.items()],
            "failed": self.failed,
            "notes": list(self.workload.task.notes),
            "log": length,
        }
        snapshot.write(self.folder, common | about, files, self.keep)

    def finish(self, method: str, outcomes: Sequence[Outcome]) -> None:
        """Some seeds of a method have finished, and what they came to is written."""
        self.found, self.round = None, 0
        for outcome in outcomes:
            key = method, outcome.record.seed
            found = self.finished[key] = Finished(outcome.record, outcome.examples)
            if not self.processes.first:
                continue
            data = snapshot.encoded(finished_content(found))
            place = self.folder / FINISHED
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_bytes(place / f"{method}-{key[1]}.json", data)
            self.digests[key] = hashlib.sha256(data).hexdigest()
        self.save({"begun": None}, ())

    def fail(self, method: str, why: str) -> None:
        """A method has diverged, which it would do again."""
        if method not in self.failed:
            self.found, self.round, self.failed[method] = None, 0, why
            self.save({"begun": None}, ())

    def remove(self) -> None:
        """The run ended well."""
        remove_all(self.folder)

    # --- stopping -------------------------------------------------------------------------------------------

    def stop_if_asked(self) -> None:
        """Between two trials."""
        self.interruption.number = max(self.processes.gather(self.interruption.number))
        if self.interruption.number:
            raise self.stopped("stopped")

    def stopped(self, what: str) -> Interrupted:
        return Interrupted(f"{what}; go on with: {self.go_on}", self.interruption.number or 2)


def finished_content(found: Finished) -> dict[str, Any]:
    """As its file has it."""
    return {"record": asdict(found.record), "examples": found.examples}


def read_content(content: Any, name: str) -> Finished:
    """What the file `name` has; an error of many kinds where it is none of ours."""
    record = decode(SeedRun, content["record"], name)
    examples = ([Example(p, tuple(r), o, *at) for p, r, o, *at in client] for client in content["examples"])
    return Finished(record, list(examples))


def remove_all(folder: Path) -> None:
    """Nobody goes on from a run that ended well, and optimizer states are nobody's business."""
    for path in snapshot.newest_first(folder):
        snapshot.remove(path)
    snapshot.clear_remains(folder)
    shutil.rmtree(folder / FINISHED, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
