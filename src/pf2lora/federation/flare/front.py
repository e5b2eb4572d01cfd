"""What `federation/engine.py` asks of an engine, as FLARE's. What loads torch is imported when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pf2lora.federation.flare.admin import fetch, follow, resume_run, runs, stop_run, submit
from pf2lora.federation.flare.keys import make_authority, make_kit, make_request, remove, sign
from pf2lora.federation.flare.processes import (
    certificate_ends,
    expiry_warning,
    in_foreground,
    leave,
    open_kit,
    read_kit,
)
from pf2lora.federation.flare.provision import make_kits

if TYPE_CHECKING:
    from pf2lora.federation.protocol.checkup import Check
    from pf2lora.federation.protocol.plan import Plan
    from pf2lora.run.config import Config
    from pf2lora.run.result import Result

__all__ = [
    "certificate_ends",
    "examined",
    "expiry_warning",
    "fetch",
    "follow",
    "in_foreground",
    "leave",
    "make_authority",
    "make_kit",
    "make_kits",
    "make_request",
    "open_kit",
    "read_kit",
    "rehearse",
    "remove",
    "resume_run",
    "runs",
    "sign",
    "stop_run",
    "submit",
]


def examined(folder: Path, plan: Plan | None, *, of_run: bool = False) -> Iterator[Check]:
    """The checks of a participant's own machine."""
    from pf2lora.federation.flare.doctor import examined as look

    return look(folder, plan, of_run=of_run)


def rehearse(config: Config, out: Path, **how: Any) -> Result:
    """A whole federation on one machine."""
    from pf2lora.federation.flare.rehearse import rehearse as run

    return run(config, out, **how)
