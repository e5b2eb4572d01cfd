"""What a machine can do to a program: a full disk, files that may not be read, folders that may not be written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """`folder` as a file system of so many KiB; the test is skipped where it may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def kit_on_small_disk(kit: Path, place: str) -> Iterator[Path]:
    """A folder of a kit, or all of it, on a small file system."""
    kept = kit.with_name("kept")
    kit.rename(kept)
    kit.mkdir()
    with small_disk(kit / place, kib=4096) as disk:
        shutil.copytree(kept, kit, dirs_exist_ok=True)
        yield disk


@contextmanager
def full_disk(monkeypatch: Any, after: int = 0, only: str = "") -> Iterator[None]:
    """Everywhere, the disk is full from the file after the first `after` on, of those with `only` in their names."""
    sync, seen = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if only in name:
            seen[0] += 1
            if seen[0] > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's rights, for which permissions are nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def forbidden(path: Path, mode: int) -> Iterator[None]:
    """A file or folder with other permissions, for a program without root's rights."""
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        with as_nobody():
            yield
    finally:
        path.chmod(before)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that others may look into: pytest's own they may not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes; hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
