"""The site's own part in the order of its batches: a secret that it draws once and keeps in its state folder.

Who knows a run's seed and a site's name knows which rows meet in a batch; over epochs that helps to take an update
apart. With the secret mixed in, the order is still a pure function, so a site that is started again goes on bit by
bit, but only the site can compute it.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from pf2lora.core.streams import stream_seed
from pf2lora.federation.protocol.checkpoints import StateFolderError, writing

FILE = "batch-secret"


def private_seed(seed: int, run: str, state: Path) -> int:
    """The seed of a run's batches and dropout at the site whose state folder this is. Two runs differ: what the sums of
    two alike, of which one is without a site, differed by would else be that site's update."""
    return stream_seed(seed, "site", run, read_secret(state))


def read_secret(state: Path) -> str:
    """The site's secret; drawn where there is none."""
    path = state / FILE
    with writing(state):
        if not path.exists():
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial = path.with_name(f".{FILE}.{os.getpid()}")
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(partial, path)  # of two processes at once one is first, and both read its secret
            except FileExistsError:
                pass
            finally:
                partial.unlink()
        found = path.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch(r"[0-9a-f]{64}", found):
        raise StateFolderError(
            f"{path} is damaged: put its backup there, or remove it to draw another", "state"
        )
    return found
