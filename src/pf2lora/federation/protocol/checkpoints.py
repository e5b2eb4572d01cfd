"""What a site keeps between rounds, on its own disk: its adapters and the optimizer state, and its best model so far.

The last rounds are kept, not only the newest: after a crash the server may be a round behind, and the site then
goes back to the state it had when that round began. A server that is further behind was restored from a backup: where
the site cannot go back that far it refuses, and what it has done since is never lost.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pf2lora import atomic
from pf2lora.core.method import State, Tree, over_tensors, tensors_of
from pf2lora.errors import UserError
from pf2lora.federation.protocol.buffers import pieces
from pf2lora.federation.protocol.wire import Memory
from pf2lora.folder_lock import Busy, acquire
from pf2lora.parsing import read_tensors

logger = logging.getLogger("pf2lora")

KEPT = 3  # rounds
ASIDE, KEEP_NEWEST = (
    "aside",
    "keep-newest",
)  # a folder of states of rounds that the server lost; a file that says go on
SERVED, RESIDUAL = "served", "residual "  # names of tensors of `Memory`, the second with an entry's behind it
STATE, BEST = "round", "best"  # the two kinds of file: the state after a round, the best model up to it


class StateFolderError(UserError):
    """A run's state cannot be written or read. `code` is what the server is told of it."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """An OSError of what is written into `folder` meanwhile becomes one line for the user, a StateFolderError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            line, code = f"the disk of {folder} is full: free some space, then start again", "disk-full"
        else:
            reason = error.strerror or str(error)
            line = f"the folder {folder} cannot be written ({reason}): choose another or fix it"
            code = "unwritable"
        raise StateFolderError(line, code) from None


class Checkpoint(NamedTuple):
    """A site's state after `round` (0: before the first), with the local steps it has done."""

    round: int
    steps: int
    state: State
    unpruned: Tensor | None = None  # x before it was sent, where the method prunes it then
    largest: float = 0.0  # the site's largest update so far (`UpdateLedger`)
    wire: Memory = Memory()  # where changes travel in fewer bits

    @property
    def before(self) -> State:
        """The state as the round's local steps left it."""
        return self.state if self.unpruned is None else self.state._replace(x=self.unpruned)


class CheckpointFolder:
    """The rounds of one run at one site. Only one process may use it at a time."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.lock: weakref.finalize[..., CheckpointFolder] | None = None

    def open(self) -> None:
        """Make the folder and lock it."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                self.lock = weakref.finalize(self, os.close, acquire(self.folder))
            except Busy:
                raise StateFolderError(
                    f"the state folder {self.folder} is in use by another process", "busy"
                ) from None

    def close(self) -> None:
        """Give the folder back, as the end of this object and that of the process do."""
        if self.lock is not None:
            self.lock()

    def save(self, saved: Checkpoint) -> None:
        """Keep the state after a round."""
        tensors = {str(i): t for i, t in enumerate(tensors_of(saved.state))}
        tensors |= {} if saved.unpruned is None else {"unpruned": saved.unpruned}
        tensors |= {} if saved.wire.served is None else {SERVED: saved.wire.served}
        tensors |= {RESIDUAL + name: rest for name, rest in saved.wire.residual.items()}
        self.write(STATE, saved.round, tensors, {"steps": str(saved.steps), "largest": saved.largest.hex()})

    def newest_before(self, number: int, initial: State, steps: int = 0) -> Checkpoint:
        """The state with which round `number` begins; a round has so many local `steps`. A StateFolderError where the
        server is further behind than states are kept, unless the site chose to go on (`keep_newest`)."""
        found, later = self.newest(STATE, number), [r for r in self.rounds() if r >= number]
        if not later or later[-1] == number:  # the server lost the round, at most, in which it crashed
            return Checkpoint(0, 0, initial) if found is None else self.load(found, initial)
        newest, choice = self.load(later[-1], initial), self.folder / KEEP_NEWEST
        if choice.exists():
            self.set_aside(number)
            self.save(newest._replace(round=number - 1))
            choice.unlink()
            return newest._replace(round=number - 1)
        if found is None and self.load(later[0], initial).steps > steps:
            raise StateFolderError(
                f"the server asks for round {number}, and this site has done round {later[-1]}: the server was "
                f"restored from an older backup, and no state before round {number} is kept. Nothing was changed. To "
                f"go on with that of round {later[-1]}: `pf2lora federation keep-newest KIT {self.run}`, then join",
                "ahead",
            )
        self.set_aside(number)
        return Checkpoint(0, 0, initial) if found is None else self.load(found, initial)

    def keep_newest(self) -> int:
        """Have the site go on with its newest state, whatever round the server asks for; the round that it is of."""
        if not self.rounds():
            raise UserError(f"{self.folder} has no state of the run {self.run!r}")
        with writing(self.folder):
            atomic.write_text(self.folder / KEEP_NEWEST, "")
        return self.rounds()[-1]

    def set_aside(self, number: int) -> None:
        """Keep what was done from round `number` on, which the server knows nothing of, where nothing looks for it."""
        place = self.folder / ASIDE / f"{time.time_ns()}"
        with writing(self.folder):
            place.mkdir(parents=True)
            for kind in (STATE, BEST):
                for later in [r for r in self.rounds(kind) if r >= number]:
                    self.path(kind, later).rename(place / self.path(kind, later).name)
        logger.warning("the server is behind: what this site did from round %d on is in %s", number, place)

    def load(self, number: int, like: State) -> Checkpoint:
        """The state after round `number`, on the device of `like`, whose shapes it must have; a StateFolderError if it
        cannot be used."""
        tensors, header = self.read(STATE, number)
        path, steps = self.path(STATE, number), header.get("steps", "")
        pieces = [tensors[name] for i in range(len(tensors)) if (name := str(i)) in tensors]
        state, unpruned = restored(like, pieces, path), None
        if "unpruned" in tensors:
            unpruned = restored(like.x, [tensors["unpruned"]], path)
        if not re.fullmatch(r"[0-9]{1,15}", steps):
            raise StateFolderError(f"the state {path} is damaged: it has no number of steps", "state")
        try:
            largest = float.fromhex(header.get("largest", "0x0p+0"))
        except ValueError:
            raise StateFolderError(
                f"the state {path} is damaged: its largest update is none", "state"
            ) from None
        residual = {n.removeprefix(RESIDUAL): t for n, t in tensors.items() if n.startswith(RESIDUAL)}
        return Checkpoint(number, int(steps), state, unpruned, largest, Memory(tensors.get(SERVED), residual))

    def take_back(self, saved: Checkpoint, initial: State) -> Checkpoint:
        """A round undone, whose update the server refused: the state is that of the round before. The batches were
        drawn and are not drawn again."""
        before = [number for number in self.rounds() if number < saved.round]
        older = self.load(before[-1], initial) if before else Checkpoint(0, 0, initial)
        undone = older._replace(round=saved.round, steps=saved.steps)
        self.save(undone)
        return undone

    # --- files by round -------------------------------------------------------------------------------------

    def write(self, kind: str, number: int, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
        """All or nothing: a crash leaves the rounds before untouched. Old ones go."""
        header = {"run": self.run, "round": str(number), **header}
        with writing(self.folder):
            atomic.write_pieces(self.path(kind, number), pieces(tensors, header))
        for old in self.rounds(kind)[:-KEPT]:
            self.path(kind, old).unlink(missing_ok=True)

    def read(self, kind: str, number: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the header of a file; a StateFolderError if it cannot be read."""
        path = self.path(kind, number)
        try:
            tensors, header = read_tensors(path)
        except UserError as error:
            raise StateFolderError(f"the state {error}", "state") from None
        if header.get("run") != self.run or header.get("round") != str(number):
            raise StateFolderError(
                f"the state {path} is not of round {number} of the run {self.run!r}; use another state folder",
                "state",
            )
        return tensors, header

    def newest(self, kind: str, number: int) -> int | None:
        """The last round before `number` that has a file; later ones are of rounds that the server lost."""
        return max((r for r in self.rounds(kind) if r < number), default=None)

    def rounds(self, kind: str = STATE) -> list[int]:
        """The rounds that have a file, oldest first."""
        names = (re.fullmatch(rf"{kind}-([0-9]{{6,15}})", p.stem) for p in self.folder.glob("*.safetensors"))
        return sorted(int(name[1]) for name in names if name)

    def path(self, kind: str, number: int) -> Path:
        """The file of round `number`."""
        return self.folder / f"{kind}-{number:06d}.safetensors"


def restored(like: Tree, tensors: Sequence[Tensor], file: Path) -> Tree:
    """Nested tuples as `like`, with the tensors that `tensors_of` gave and `file` held; a StateFolderError if they do
    not fit."""
    if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in tensors_of(like)]:
        raise StateFolderError(
            f"the state {file} belongs to another adapter; use another state folder", "state"
        )
    left = iter(tensors)
    return over_tensors(lambda template: next(left).to(template.device), like)
