"""Snapshots on the disk: folders of files that are there whole or not at all, of which the last few are kept.

A snapshot is written aside and moved into place by one rename; its manifest, written last, has the SHA-256 of every
file and of itself. What a crash tore or somebody changed is noticed before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pf2lora.engines.processes import Processes, as_bytes
from pf2lora.errors import shown

FORMAT = 1
MANIFEST = "manifest.json"
ASIDE = ".writing"  # a snapshot that is not yet one


class Damaged(Exception):
    """A snapshot that cannot be used; the message says what is wrong with which file."""


@dataclass(frozen=True)
class Snapshot:
    """One that is whole: `about` is what its writer said of it."""

    path: Path
    about: dict[str, Any]
    digests: Mapping[str, str]

    def read(self, name: str) -> bytes:
        """A file of it, as it was written."""
        if name not in self.digests:
            raise Damaged(f"it has no {name}")
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != self.digests[name]:
            raise Damaged(f"{name} is not as it was written")
        return data


@dataclass(frozen=True)
class SharedSnapshot(Snapshot):
    """The snapshot of a run that several processes share: the first reads, and all of them get what it read. They ask
    for the same files in the same order."""

    processes: Processes

    def read(self, name: str) -> bytes:
        data = None
        with self.processes.together():
            if self.processes.first:
                data = as_bytes(super().read(name))
        return self.processes.bytes_from_first(data).numpy().tobytes()


def write(folder: Path, about: Mapping[str, Any], files: Iterable[tuple[str, bytes]], keep: int) -> Path:
    """A new snapshot in `folder`, and the oldest gone, so that `keep` are left. An OSError leaves the others as they
    were. Files come one by one: a thousand clients' are not in memory at once."""
    clear_remains(folder)
    aside = folder / ASIDE
    try:
        aside.mkdir(parents=True, mode=0o700)
        digests = {name: write_file(aside / name, data) for name, data in files}
        manifest = {"format": FORMAT, "about": dict(about), "files": digests}
        write_file(aside / MANIFEST, encoded(manifest | {"sha256": digest(manifest)}))
        for inner in {aside, *(path.parent for path in map(aside.joinpath, digests))}:
            sync(inner)
        last = max(numbers(folder), default=0)
        place = folder / f"{last + 1:06d}"
        aside.rename(place)
        sync(folder)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in numbers(folder)[:-keep]:
        remove(folder / f"{old:06d}")
    return place


def write_file(path: Path, data: bytes) -> str:
    """Write a new file down to the disk; its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def sync(folder: Path) -> None:
    """Names are on the disk, too: a rename before the files it moves would survive a power cut alone."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(snapshot: Path) -> None:
    """The manifest first: a kill between two files leaves remains that nobody takes for a snapshot."""
    (snapshot / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(snapshot, ignore_errors=True)


def clear_remains(folder: Path) -> None:
    """What a kill left of one that was being written or removed."""
    shutil.rmtree(folder / ASIDE, ignore_errors=True)
    for number in numbers(folder):
        if not (folder / f"{number:06d}" / MANIFEST).exists():
            shutil.rmtree(folder / f"{number:06d}", ignore_errors=True)


def numbers(folder: Path) -> list[int]:
    """The snapshots that are there, oldest first."""
    return sorted(int(path.name) for path in folder.glob("[0-9]" * 6) if path.is_dir())


def newest_first(folder: Path) -> Iterator[Path]:
    """Where the snapshots are; remains of one that was being removed are none."""
    for number in reversed(numbers(folder)):
        path = folder / f"{number:06d}"
        if (path / MANIFEST).exists():
            yield path


def opened(path: Path) -> Snapshot:
    """The snapshot, every file of which is as it was written; else Damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        claimed = manifest.pop("sha256")
        about, digests = manifest["about"], dict(manifest["files"])
        if manifest["format"] != FORMAT:
            raise Damaged(
                f"{MANIFEST} has the format {shown(manifest['format'])}, and this version knows {FORMAT}"
            )
        if claimed != digest(manifest) or not isinstance(about, dict):
            raise Damaged(f"{MANIFEST} is not as it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} cannot be read") from None
    for name in digests:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damaged(f"{MANIFEST} names a file outside, {name!r}")
    found = Snapshot(path, about, digests)
    for name in digests:
        found.read(name)
    return found


def encoded(value: Any) -> bytes:
    """JSON, the same bytes for the same value."""
    return json.dumps(value, allow_nan=False).encode()


def digest(value: Any) -> str:
    return hashlib.sha256(encoded(value)).hexdigest()


# --- tensors with a few words ------------------------------------------------------------------------------


def packed(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """A safetensors file whose header has `about`."""
    there = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return save(there, metadata={"about": encoded(about).decode()})


def unpacked(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of such a file, and its `about`."""
    try:
        length = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
        return load(data), about
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"a file is no safetensors of ours ({type(error).__name__})") from None
