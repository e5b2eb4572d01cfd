"""Across machines: the same methods in a real federation on NVIDIA FLARE. A site is the local engine with M = 1.

`protocol/` has the two halves of a run, `site` and `server`, and what passes between them; it knows nothing of FLARE.
`engine` says what is asked of whoever carries their messages. `flare/` does it: messages (`executor`, `controller`),
start-up kits, processes.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from pf2lora.errors import UserError, missing_extra

ENGINE_NAME, ENGINE = "nvflare", "2.9."  # FLARE's interfaces move with its minor version


def require_nvflare() -> str:
    """The version of the installed engine, or one line that says how to get the one that fits."""
    try:
        found = version(ENGINE_NAME)
    except PackageNotFoundError:
        raise missing_extra(ENGINE_NAME, "federation", "a federation") from None
    if not found.startswith(ENGINE):
        raise UserError(
            f"{ENGINE_NAME} {found} is installed, but pf2lora's federation needs {ENGINE}x: "
            f"pip install 'pf2lora[federation]'"
        )
    return found
