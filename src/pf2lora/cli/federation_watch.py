"""`pf2lora federation watch`: a line whenever something changes in a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def changes(jobs: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A line for each state of a run that differs from the one before."""
    before = ""
    for job in jobs:
        line = described(job)
        if line != before:
            yield line
        before = line


def described(job: dict[str, Any]) -> str:
    """Where a run stands: state, round, loss, who is there, who is left out and why."""
    now = job.get("pf2lora") or {}
    if not now:
        return str(job["status"]).lower()
    parts = [f"{now['state']}, round {now['round']} of {now['rounds']}"]
    if now.get("loss") is not None:
        parts.append(f"loss {now['loss']:.4f}")
    if now.get("present"):
        parts.append(f"{len(now['present'])} sites ({', '.join(now['present'])})")
    parts += [f"{site} is left out: {why}" for site, why in now.get("left_out", {}).items()]
    return "; ".join([*parts, *([now["line"]] if now.get("line") else [])])
