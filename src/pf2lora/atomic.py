"""Writing files so that a crash, a full disk or a reader never sees half of one.

What the system refuses is a `CannotWrite`: one line for the user, and an OSError for callers who want its number.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pf2lora.errors import CannotWrite, UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PARTIAL = ".{name}.{process}.partial"  # what a file is called while a process writes it


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError of what is written to `path` meanwhile becomes a CannotWrite that names it."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(path, error) from None
    except UnicodeEncodeError:
        raise UserError(f"{path}: a text holds half of a surrogate pair, which no file can hold") from None


def partial_name(path: Path) -> Path:
    """The neighbour that is written first; a kill may leave it behind."""
    return path.with_name(PARTIAL.format(name=path.name, process=os.getpid()))


def write_bytes(path: Path, data: bytes) -> None:
    """A file of these bytes, whole or not at all."""
    write_pieces(path, [data])


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write to a neighbour, flush it to the disk, rename: readers see the old content or the new, never a part.

    Whatever stops it leaves the old content and no neighbour behind.
    """
    partial = partial_name(path)
    try:
        with writing(path):
            with partial.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """A text file in UTF-8, whole or not at all."""
    with writing(path):
        data = text.encode("utf8")
    write_bytes(path, data)


def write_json(path: Path, value: Any) -> None:
    """A JSON file that people can read too, whole or not at all; numbers that are not finite are refused."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def write_figure(path: Path, figure: Figure, dpi: int) -> None:
    """A picture of the kind that its suffix tells; the same figure gives the same file."""
    kind, drawn = path.suffix.lower()[1:], io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    write_bytes(path, drawn.getvalue())


def append_line(path: Path, line: str) -> None:
    """One more line of a log."""
    with writing(path), path.open("a", encoding="utf8") as file:
        file.write(line + "\n")


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """The folder, with those above it, if it is not there yet."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    return path


def check_writable(path: Path) -> None:
    """Find out before the work that a file or folder `path` can be written; nothing is touched."""
    with writing(path):
        place = (
            path if path.is_dir() else path.absolute().parent
        )  # a file is replaced, which its folder allows
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is a file, not a folder")
        effective = os.access in os.supports_effective_ids
        if not os.access(place, os.W_OK | os.X_OK, effective_ids=effective):
            raise PermissionError(errno.EACCES, f"nothing may be written into {place}")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder of several files that appears whole or not at all: what is yielded is filled, then renamed to `path`,
    which must not exist or be empty. Folders above it that were made for it go with a failure."""
    above = next((p for p in (path.parent, *path.parent.parents) if p.exists()), path.parent)
    partial = partial_name(path)
    try:
        with writing(path):
            make_folder(partial)
            yield partial
            if path.is_dir():
                path.rmdir()
            partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(path.parent, above)
        if isinstance(error, CannotWrite):  # of what is in it: the user knows the folder by its own name
            raise CannotWrite(path, OSError(error.errno, error.reason)) from None
        raise


@contextmanager
def undone_on_failure(*paths: Path) -> Iterator[None]:
    """Files and folders that are made meanwhile: those of `paths` that were not there before go with a failure."""
    absent = [path for path in paths if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        for path in absent:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        raise


def _remove_empty(folder: Path, above: Path) -> None:
    with suppress(OSError):
        while folder != above:
            folder.rmdir()
            folder = folder.parent
