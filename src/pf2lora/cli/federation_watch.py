"""`pf2lora federation status` and `watch`: where runs stand, now and whenever something changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pf2lora.cli.federation_join import LOGS, Log, write
from pf2lora.cli.text import safe
from pf2lora.errors import unknown
from pf2lora.federation.engine import engine

LeadKit = Annotated[Path, typer.Option("--kit", help="The lead's kit.")]


def status(kit: LeadKit) -> None:
    """Where every run stands."""
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "job", "state", "round", "sites there", "deadline", "quorum")
    lines = []
    for job in engine().runs(kit):
        now = job.get("pf2lora") or {}
        there = ", ".join(now.get("present", []))
        at = f"{now['round']} of {now['rounds']}" if now else ""
        limits = (f"{now['deadline']:g} s", f"{now['quorum']:g}") if now else ("", "")
        state = now.get("state") or job["status"].lower()
        table.add_row(*map(safe, (job["name"], job["job_id"][:8], state, at, there, *limits)))
        said = [*remarks(now), *([now["line"]] if now.get("line") else [])]
        lines += [f"{job['name']} ({job['job_id'][:8]}): {line}" for line in said]
    console = Console()
    console.print(table)
    for line in lines:
        console.print(safe(line), highlight=False)


def watch(
    kit: LeadKit, name: Annotated[str, typer.Argument(help="The run's name.")], log: Log = "lines"
) -> None:
    """Say what changes in a run, until it is over."""
    if log not in LOGS:
        raise unknown("log", log, LOGS)
    if log == "json":
        for event, values in happened(engine().follow(kit, name)):
            write(event, values)
        return
    for line in changes(engine().follow(kit, name)):
        typer.echo(safe(line))


def happened(jobs: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A run's changes as events, those of a participant's log."""
    from pf2lora.federation.protocol import kit_events
    from pf2lora.federation.protocol.run_status import Status

    before: Status | None = None
    for job in jobs:
        said = job.get("pf2lora") or {"state": str(job["status"]).lower(), "round": 0, "rounds": 0}
        now = Status(**{key: value for key, value in said.items() if key in Status.__dataclass_fields__})
        yield from kit_events.changes(job["name"], before, now)
        before = now


def changes(jobs: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A line for each state of a run that differs from the one before."""
    before = ""
    for job in jobs:
        line = described(job)
        if line != before:
            yield line
        before = line


def described(job: dict[str, Any]) -> str:
    """Where a run stands: state, round, loss, who is there, who is not and why."""
    now = job.get("pf2lora") or {}
    if not now:
        return str(job["status"]).lower()
    parts = [f"{now['state']}, round {now['round']} of {now['rounds']}"]
    if now.get("loss") is not None:
        parts.append(f"loss {now['loss']:.4f}")
    if now.get("present"):
        parts.append(f"{len(now['present'])} sites ({', '.join(now['present'])})")
    parts += remarks(now)
    return "; ".join([*parts, *([now["line"]] if now.get("line") else [])])


def remarks(now: dict[str, Any]) -> list[str]:
    """Who is left out and why, and who was away at the end: they get the last x when they come back."""
    said = [f"{site} is left out: {why}" for site, why in now.get("left_out", {}).items()]
    return [*said, *(f"{site} is without the last x" for site in now.get("absent", []))]
