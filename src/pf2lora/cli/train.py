"""`pf2lora train` and `pf2lora compare`: federate a model over clients' files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pf2lora.cli.options import WRITTEN, configured, read_config
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run.config import Config, to_toml

Out = Annotated[
    Path, typer.Option("--out", help="The run folder to write.", rich_help_panel="Everyday", **WRITTEN)
]
OutIfGiven = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="The run folder to write [dim](default: runs/ and the command's name)[/dim]",
        rich_help_panel="Everyday",
        show_default=False,
        **WRITTEN,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show the whole config as TOML and stop.")]


@configured
def train(
    settings: dict[str, Any],
    file: Path | None,
    out: OutIfGiven = None,
    force: Force = False,
    print_config: PrintConfig = False,
) -> None:
    """Train one method on your clients' files; write adapters, scores and a report."""
    config = read_config(settings, file)
    if len(config.training.method) > 1:
        raise UserError("train takes one method; 'pf2lora compare' takes several")
    execute(config, out or Path(config.output.out or "runs/train"), force, print_config)


@configured
def compare(
    settings: dict[str, Any],
    file: Path | None,
    out: OutIfGiven = None,
    force: Force = False,
    print_config: PrintConfig = False,
) -> None:
    """Train several methods on the same clients and seeds, and compare them."""
    config = read_config(settings, file)
    if "method" not in settings and config.training.method == Config().training.method:
        config = replace(config, training=replace(config.training, method=tuple(METHODS.own)))
    execute(config, out or Path(config.output.out or "runs/compare"), force, print_config)


def execute(config: Config, out: Path, force: bool, print_config: bool) -> None:
    """Run a config and show what came out."""
    config = replace(config, output=replace(config.output, out=str(out)))
    if print_config:
        typer.echo(to_toml(config), nl=False)
        return
    from pf2lora.cli.show import quiet_libraries, show_clients, show_note, show_result
    from pf2lora.run import api
    from pf2lora.run.comparison import prepare
    from pf2lora.run.folder import check_free

    quiet_libraries()
    check_free(out, force=force)  # before the model is loaded: a mistaken --out should not cost a minute
    workload = prepare(config)
    show_clients(workload)
    result = api.run(config, out, force=force, on_note=show_note, workload=workload)
    show_result(result, out)
