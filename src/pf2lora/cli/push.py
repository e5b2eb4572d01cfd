"""`pf2lora push`: an adapter of a run to the Hugging Face hub."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pf2lora.cli.use import ClientName, Method, Run
from pf2lora.errors import UserError


def push(
    run: Run,
    to: Annotated[str, typer.Option("--to", help="The repository on the hub: owner/name.")],
    client: ClientName = None,
    method: Method = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="The base model's name on the hub, where the run had a folder."),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="The adapter's licence, as the hub spells it: apache-2.0, …"),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="For everybody to see (default: private).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Publish without asking.")] = False,
) -> None:
    """Publish a client's adapter, or the common one, on the Hugging Face hub: its four files and nothing else."""
    from pf2lora.run.config import config_file

    config_file(run)  # a wrong folder is said before torch is loaded
    check_repository(to)
    from pf2lora.run.numbers import size
    from pf2lora.run.publish import adapter_folder, files_to_publish, upload

    folder = adapter_folder(run, method, client)
    files = files_to_publish(folder, to, base, licence)
    whose = f"the adapter of {client}" if client else "the common adapter"
    seen = "for everybody to see" if public else "as a private repository"
    typer.echo(f"{whose} ({folder}) to {to}, {seen}:", err=True)
    for name, content in files.items():
        typer.echo(f"  {name}  {size(len(content))}", err=True)
    if licence is None:
        typer.echo("  without a licence (--license names one)", err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(
                "push publishes what was learned from a client's texts; --yes says that this is meant"
            )
        if not typer.confirm("publish it?", err=True):
            raise typer.Exit(1)
    typer.echo(upload(files, to, public=public))


def check_repository(name: str) -> None:
    """Owner and name, before anything is read."""
    owner, slash, rest = name.partition("/")
    if not (owner and slash and rest) or "/" in rest or any(c.isspace() for c in name):
        raise UserError(f"--to is {name!r}; a repository on the hub is owner/name")
