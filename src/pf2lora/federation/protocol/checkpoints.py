"""What a site keeps between rounds, on its own disk: its adapters and the optimizer state, per round.

The last rounds are kept, not only the newest: after a crash the server may be a round behind, and the site then
goes back to the state it had when that round began.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pf2lora import atomic
from pf2lora.core.method import State, over_tensors
from pf2lora.errors import UserError

KEPT = 3  # rounds


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


class CheckpointFolder:
    """The rounds of one run at one site. Only one process may use it at a time."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder and lock it."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StateFolderError(
                f"the state folder {self.folder} is in use by another process", "busy"
            ) from None

    def save(self, saved: Checkpoint) -> None:
        """All or nothing: a crash leaves the round before untouched."""
        tensors = {str(i): t.detach().cpu().contiguous() for i, t in enumerate(leaves(saved.state))}
        header = {"run": self.run, "round": str(saved.round), "steps": str(saved.steps)}
        with writing(self.folder):
            atomic.write_bytes(self.path(saved.round), save(tensors, metadata=header))
        for old in self.rounds()[:-KEPT]:
            self.path(old).unlink(missing_ok=True)

    def newest_before(self, number: int, initial: State) -> Checkpoint:
        """The state with which round `number` begins; later ones, of rounds that the server lost, are dropped."""
        for later in [r for r in self.rounds() if r >= number]:
            self.path(later).unlink(missing_ok=True)
        for found in reversed(self.rounds()):
            return self.load(found, initial)
        return Checkpoint(0, 0, initial)

    def load(self, number: int, like: State) -> Checkpoint:
        """The state after round `number`, on the device of `like`, whose shapes it must have; a StateFolderError if it
        cannot be used."""
        path = self.path(number)
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata()
                tensors = [file.get_tensor(str(i)) for i in range(len(list(leaves(like))))]
        except (SafetensorError, OSError) as error:
            raise StateFolderError(
                f"the state {path} cannot be read: {str(error).splitlines()[0]}", "state"
            ) from None
        pieces = iter(tensors)

        def restored(template: Tensor) -> Tensor:
            piece = next(pieces)
            if piece.shape != template.shape:
                raise StateFolderError(
                    f"the state {path} belongs to another adapter; use another state folder", "state"
                )
            return piece.to(template.device)

        return Checkpoint(int(header["round"]), int(header["steps"]), over_tensors(restored, like))

    def rounds(self) -> list[int]:
        """The rounds whose state is here, oldest first."""
        return sorted(int(p.stem.removeprefix("round-")) for p in self.folder.glob("round-*.safetensors"))

    def path(self, number: int) -> Path:
        """The file of the state after round `number`."""
        return self.folder / f"round-{number:06d}.safetensors"


def leaves(state: State) -> Iterator[Tensor]:
    """The tensors of a state, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    over_tensors(note, state)
    return iter(found)
