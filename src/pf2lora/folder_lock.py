"""One process at a time writes into a folder: a lock that ends with its process, however that ends.

The lock is on the folder itself, so no file is left behind and a folder that is moved or copied brings none along.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pf2lora.errors import UserError, check_path, reading

# What file systems say that cannot lock a folder (some network ones): there everybody must look out for himself.
CANNOT = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Busy(UserError):
    """Another process is writing into the folder."""


def acquire(folder: Path) -> int:
    """Lock a folder that is there; `os.close` of what this returns gives it back. `Busy` where another has it."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in CANNOT:
            return held
        os.close(held)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise Busy(
            f"another process is writing into {str(folder)!r}: wait until it has ended, or choose another folder"
        ) from None
    return held


def check_unused(folder: Path) -> None:
    """`Busy` where another process writes into the folder now; one that is not there is nobody's."""
    with reading(check_path(folder), "output folder"):
        if folder.is_dir() and os.access(
            folder, os.R_OK, effective_ids=os.access in os.supports_effective_ids
        ):
            os.close(acquire(folder))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder, and have it for oneself meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = acquire(folder)
    except OSError as error:
        raise UserError(f"the output folder {str(folder)!r} cannot be made: {error.strerror}") from None
    try:
        yield
    finally:
        os.close(held)
