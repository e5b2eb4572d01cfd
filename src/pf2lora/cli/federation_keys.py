"""`pf2lora federation`: keys that are made where they live, and who may no longer take part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pf2lora.cli.options import WRITTEN
from pf2lora.federation.engine import engine

Days = Annotated[int, typer.Option("--days", help="For how long the certificate is valid.", min=1)]
Authority = Annotated[Path, typer.Option("--authority", help="The authority's folder.")]
OwnKit = Annotated[Path, typer.Option("--kit", help="The server's kit, or a site's.")]
Name = Annotated[str, typer.Argument(help="A site's name, or a person's e-mail address.")]


def authority(
    project: Annotated[Path, typer.Argument(help="project.toml: name, host, port, sites.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder for the root key.", **WRITTEN)] = Path(
        "authority"
    ),
    days: Days = 3650,
) -> None:
    """Make an authority that signs requests, and has no key of any participant."""
    found = engine().make_authority(project, out, days)
    typer.echo(
        f"the authority is in {out}: keep it offline; its certificate's fingerprint, for everybody, is\n{found}"
    )


def request(
    name: Annotated[
        str, typer.Argument(help="A site's name, the server's host, or a person's e-mail address.")
    ],
    project: Annotated[str, typer.Option("--project", help="The project's name.")],
    kind: Annotated[str, typer.Option("--as", help="site, server, lead or member.")] = "site",
    out: Annotated[Path, typer.Option("--out", help="A new folder; its key stays here.", **WRITTEN)] = Path(
        "request"
    ),
) -> None:
    """Make a private key here, and the request for its certificate."""
    made = engine().make_request(name, kind, project, out)
    typer.echo(f"send {made} to the authority; the private key stays in {out}")


def sign(
    file: Annotated[Path, typer.Argument(help="A request, as `request` made it.")],
    authority: Authority = Path("authority"),
    out: Annotated[Path, typer.Option("--out", help="The file to send back.", **WRITTEN)] = Path(
        "signed.zip"
    ),
    days: Days = 365,
) -> None:
    """At the authority: sign a request of somebody whom its project.toml names."""
    name = engine().sign(file, authority, out, days)
    typer.echo(f"{name}: send {out} back")


def kit_of_signed(
    signed: Annotated[Path, typer.Argument(help="What the authority sent back.")],
    fingerprint: Annotated[
        str, typer.Option("--fingerprint", help="The authority's, as it told you otherwise.")
    ],
    request: Annotated[Path, typer.Option("--request", help="The folder that `request` made.")] = Path(
        "request"
    ),
    out: Annotated[
        Path, typer.Option("--out", help="The kit; one that is there is renewed.", **WRITTEN)
    ] = Path("kit"),
) -> None:
    """Make a start-up kit of a signed request, or renew one."""
    typer.echo(f"the kit is in {engine().make_kit(signed, request, fingerprint, out)}")


def remove(name: Name, kit: OwnKit) -> None:
    """At the server: let a site or a person in no more, whatever the certificate says.

    At a site: take no plans that this person signed, and be in no masked sum with this site, whatever the server says.
    """
    from pf2lora.federation.protocol.names import is_person

    engine().remove(kit, name)
    server = engine().read_kit(kit).server
    if is_person(name):
        said = (
            "runs that {0} submitted stop after their round" if server else "no plan of {0}'s is taken here"
        )
        typer.echo(f"{name} is refused from now on; {said.format(name)}")
    elif server:
        typer.echo(f"{name} is let in no more, from its next heartbeat on; a run that it is in leaves it out")
    else:
        typer.echo(
            f"{name} is in no masked sum with this site, from the next round on; other runs go on with it"
        )


def readmit(name: Name, kit: OwnKit) -> None:
    """Take back what `remove` did: at the server once it is started again, at a site at once."""
    engine().remove(kit, name, back=True)
    server = engine().read_kit(kit).server
    typer.echo(f"{name} is let in again" + (" when the server is next started" if server else ""))
