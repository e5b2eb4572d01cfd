"""`pf2lora federation`: what a site does for itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pf2lora.errors import UserError

if TYPE_CHECKING:
    from pf2lora.federation.protocol.policy import Policy

SiteKit = Annotated[Path, typer.Argument(help="The site's kit.")]


def read_limits(file: Path | None) -> Policy | None:
    """The policy in `file`, if one is named."""
    if file is None:
        return None
    if not file.is_file():
        raise UserError(f"there is no file {str(file)!r}: --policy takes a policy.toml")
    from pf2lora.federation.protocol.policy import read_policy

    return read_policy(file)


def approve(
    kit: SiteKit,
    name: Annotated[
        str | None, typer.Argument(help="The run to approve (default: show those that wait).")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="The digest of the plan that is approved, as it was shown (default: show the run's)."
        ),
    ] = None,
) -> None:
    """At a site: show what waits for a person's approval, and approve what was shown, by its digest."""
    import tomli_w

    from pf2lora.federation.protocol import approvals, audit
    from pf2lora.federation.protocol.policy import POLICY_FILE, read_policy

    folder = kit / "local"
    if not (kit / "startup" / "fed_client.json").is_file():
        raise UserError(f"{str(kit)!r} is no site's kit: a run is approved at a site")
    if not read_policy(folder / POLICY_FILE).approve:
        raise UserError(f"{folder / POLICY_FILE} asks for no approval: set approve = true there first")
    if name is not None and plan is not None:
        asked = approvals.approve(folder, name, plan)
        audit.record(kit, "approved", run=name, plan=asked.approved, by=asked.by)
        typer.echo(f"run {name!r} is approved by {asked.by}: {approvals.summary(asked)}")
        typer.echo("the lead submits it again")
        return
    shown = approvals.waiting(folder) if name is None else {name: approvals.asked_for(folder, name)}
    if not shown:
        typer.echo("no run waits for an approval")
    for run, asked in shown.items():
        described = {key: value for key, value in asked.plan.items() if value not in ((), [], None)}
        command = f"pf2lora federation approve {kit} {run} --plan {approvals.digest(asked.plan)}"
        typer.echo(
            f"{tomli_w.dumps(described)}\n# {run}: {approvals.summary(asked)}\n# approve with `{command}`"
        )


def verify(
    kit: Annotated[Path, typer.Argument(help="The kit of a site or of the server.")],
    noted: Annotated[
        str | None,
        typer.Option("--last", help="A hash that `verify` said before: it must still be in the log."),
    ] = None,
) -> None:
    """Whether a participant's audit log is unbroken: every line follows from the one before it."""
    from pf2lora.federation.protocol import audit

    found = audit.verify(kit, noted)
    cut = f" ({found.cut} cut off by a crash)" if found.cut else ""
    typer.echo(f"{kit / audit.FILE}: {found.lines} lines{cut}, unbroken; the last is {found.last}")
