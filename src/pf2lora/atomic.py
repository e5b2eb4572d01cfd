"""Writing files so that a crash, a full disk or a reader never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Write to a neighbour, flush it to the disk, rename: readers see the old content or the new, never a part.

    An OSError leaves the old content and no neighbour behind.
    """
    aside = path.with_name(partial(path.name, os.getpid()))
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def partial(name: str, process: int | str) -> str:
    """What a file is called while a process writes it; a kill may leave it behind."""
    return f".{name}.{process}.partial"


def write_text(path: Path, text: str) -> None:
    """A text file in UTF-8, whole or not at all."""
    write_bytes(path, text.encode("utf8"))


def write_json(path: Path, value: Any) -> None:
    """A JSON file that people can read too, whole or not at all; numbers that are not finite are refused."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
