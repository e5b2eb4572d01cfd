"""`pf2lora federation join` and `leave`: a participant is started from its kit, watched, and ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pf2lora.errors import unknown
from pf2lora.federation.engine import engine

if TYPE_CHECKING:
    from pf2lora.federation.protocol.metrics import Participant

LOGS = ("lines", "json")
KitFolder = Annotated[Path, typer.Argument(help="A start-up kit, as `kit` or `provision` made it.")]
Log = Annotated[
    str,
    typer.Option(
        "--log",
        help="lines, or json: an object per event on standard output, and nothing else there.",
    ),
]


def tell(line: str) -> None:
    """Progress, on standard error: standard output is for results."""
    typer.echo(line, err=True)


def join(
    kit: KitFolder,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            help="Figures for Prometheus: a port of the loopback interface, HOST:PORT, or a file that ends in .prom.",
        ),
    ] = None,
    log: Log = "lines",
) -> None:
    """Start the server or a site from its kit; runs until Ctrl-C."""
    from pf2lora.federation.protocol.metrics import Participant, exposition, published

    if log not in LOGS:
        raise unknown("log", log, LOGS)
    own = engine()
    opened = own.open_kit(kit)
    soon = own.expiry_warning(opened)
    if soon:
        tell(soon)
    ends = own.certificate_ends(opened).timestamp()
    who = Participant(opened.folder, opened.name, opened.server, ends)
    with ExitStack() as stack:
        looks = []
        if metrics is not None:
            looks.append(stack.enter_context(published(metrics, lambda: exposition(who))))
        if log == "json":
            looks.append(json_log(who))
        tell(f"starting {opened.name}" + (f" on port {opened.port}" if opened.server else ""))

        def meanwhile() -> None:
            for look in looks:
                look()

        code = own.in_foreground(opened, meanwhile, sys.stderr.buffer if log == "json" else None)
        if log == "json":
            write("left", {"name": who.name, "code": code})
    sys.exit(code)


def json_log(who: Participant) -> Callable[[], None]:
    """Writes what happened since the last call."""
    from pf2lora import __version__
    from pf2lora.federation.protocol.kit_events import KitEvents

    events = KitEvents(who)
    role = "server" if who.server else "site"
    write("joined", {"name": who.name, "role": role, "version": __version__})

    def look() -> None:
        for name, values in events.look():
            write(name, values)

    return look


def write(event: str, values: dict[str, Any]) -> None:
    """An event on standard output."""
    from pf2lora.run.plain_log import json_line

    typer.echo(json_line(event, values))


def leave(kit: KitFolder) -> None:
    """End the server or the site that runs from a kit on this machine, whoever started it."""
    opened = engine().read_kit(
        kit
    )  # also one that could not be started any more: expired, or with a key that others read
    engine().leave(opened)
    tell(f"{opened.name} has ended")
