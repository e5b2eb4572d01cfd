"""`pf2lora federation doctor`: whether a participant can take part, a line for every check."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pf2lora.cli.options import read_config
from pf2lora.errors import UserError
from pf2lora.federation.engine import engine

if TYPE_CHECKING:
    from pf2lora.federation.protocol.checkup import Check
    from pf2lora.federation.protocol.plan import Plan

COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red", "skipped": "bright_black"}


def doctor(
    kit: Annotated[Path, typer.Argument(help="The kit of a site or of the server.")],
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", help="At a site: a run.toml that the lead will submit (default: the defaults)."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="At a site: the task that its data is for (classification).")
    ] = None,
    labels: Annotated[str, typer.Option("--labels", help="At a site: every label of the federation.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One object on standard output.")] = False,
) -> None:
    """Whether a site or the server can take part: certificate, clock, port, disk, data, model, one step, rows.

    Exit code 0 if nothing is wrong, 1 if something is. Nothing is sent, and no run's state is touched.
    """
    from pf2lora.federation.protocol.checkup import WRONG

    if not kit.is_dir():
        raise UserError(f"{kit}: there is no such kit; `pf2lora federation kit` or `provision` makes them")
    found: list[Check] = []
    for check in engine().examined(kit, planned(kit, run, task, labels), of_run=run is not None):
        found.append(check)
        if not as_json:
            word = typer.style(f"{check.state:<8}", fg=COLOURS[check.state])
            typer.echo(f"{word} {check.name}: {check.line}")
    wrong = sum(check.state == WRONG for check in found)
    if as_json:
        said = {"kit": str(kit), "ok": not wrong, "checks": [asdict(check) for check in found]}
        typer.echo(json.dumps(said, indent=1, ensure_ascii=False))
    sys.exit(1 if wrong else 0)


def planned(kit: Path, run: Path | None, task: str | None, labels: str) -> Plan | None:
    """What a site is looked at for; nothing at the server."""
    from pf2lora.cli.show import quiet_libraries
    from pf2lora.federation.protocol.checkup import plan_for

    opened = engine().read_kit(kit)
    if opened.server:
        if run or task or labels:
            raise UserError("--run, --task and --labels are for a site: the server has no data and no model")
        return None
    quiet_libraries()
    config = read_config({"task": task} if task else {}, run)
    return plan_for(config, opened.name, tuple(labels.split(",") if labels else ()))
