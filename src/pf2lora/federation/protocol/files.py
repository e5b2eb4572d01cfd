"""Writing files so that a crash, a full disk or a reader never sees half of one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from pf2lora.errors import UserError


class StateFolderError(UserError):
    """The site's state cannot be written. `code` is what the server is told."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def write_whole(path: Path, data: bytes) -> None:
    """Write to a neighbour, flush it to the disk, rename: readers see the old content or the new, never a part."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritable(path.parent, error) from None


def write_json(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value, indent=1).encode())


def unwritable(folder: Path, error: OSError) -> StateFolderError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StateFolderError(
            f"the disk of {folder} is full: free some space, then start the site again", "disk-full"
        )
    reason = error.strerror or str(error)
    return StateFolderError(
        f"the folder {folder} cannot be written ({reason}): choose another or fix it", "unwritable"
    )
