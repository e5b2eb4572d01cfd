"""`pf2lora train` and `pf2lora compare`: federate a model over clients' files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pf2lora.cli.options import WRITTEN, configured, read_config
from pf2lora.errors import UserError, unknown
from pf2lora.methods import SETS
from pf2lora.run.config import Config, to_commented_toml, with_found_model
from pf2lora.run.launch import check_alone

if TYPE_CHECKING:
    from pf2lora.run.result import Result

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
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what it would do and cost, and every problem; train nothing.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder, if one was begun.")]
Log = Annotated[
    str,
    typer.Option(
        "--log",
        help="What is shown meanwhile: auto (a live screen on a terminal, else a line now and then), lines, json (an "
        "object per event on standard output, and nothing else there), or none.",
    ),
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show the whole config as TOML and stop.")]


@configured
def train(
    settings: dict[str, Any],
    file: Path | None,
    out: OutIfGiven = None,
    force: Force = False,
    resume: Resume = False,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    log: Log = "auto",
) -> None:
    """Train one method on your clients' files; write adapters, scores and a report."""
    config = read_config(settings, file)
    if len(config.training.method) > 1:
        raise UserError("train takes one method; 'pf2lora compare' takes several")
    execute(
        config,
        out or Path(config.output.out or "runs/train"),
        force,
        print_config,
        resume=resume,
        dry_run=dry_run,
        log=log,
    )


@partial(configured, method="paper")
def compare(
    settings: dict[str, Any],
    file: Path | None,
    out: OutIfGiven = None,
    force: Force = False,
    resume: Resume = False,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    log: Log = "auto",
) -> None:
    """Train several methods (by default those of the paper) on the same clients and seeds, and compare them."""
    config = read_config(settings, file)
    if "method" not in settings and config.training.method == Config().training.method:
        config = replace(config, training=replace(config.training, method=SETS["paper"]))
    execute(
        config,
        out or Path(config.output.out or "runs/compare"),
        force,
        print_config,
        resume=resume,
        dry_run=dry_run,
        log=log,
    )


def execute(
    config: Config,
    out: Path,
    force: bool,
    print_config: bool,
    *,
    resume: bool = False,
    dry_run: bool = False,
    log: str = "auto",
) -> None:
    """Run a config and show what came out."""
    config = replace(config, output=replace(config.output, out=str(out)))
    if print_config:
        typer.echo(to_commented_toml(config), nl=False)
        return
    if dry_run:
        check_alone("a dry run", "it trains nothing")
        from pf2lora.cli.dry_run import show_dry_run
        from pf2lora.run.folder import check_free

        show_dry_run(config, *([] if force or resume else [lambda: check_free(out, force=False)]))
        return
    config = with_found_model(config)
    from pf2lora.cli.show import quiet_libraries, show_clients, show_note, show_result
    from pf2lora.run import api, launch
    from pf2lora.run.comparison import prepare
    from pf2lora.run.events import Note, RunEnded
    from pf2lora.run.interruption import Interrupted
    from pf2lora.run.progress import LOGS, shown
    from pf2lora.run.resuming import ended_for_all

    if log not in LOGS:
        raise unknown("log", log, LOGS)
    quiet_libraries()
    processes = launch.join(config.model.device)
    log = log if processes.first else "none"  # of several processes the first speaks
    # Before the model is loaded: a mistaken --out should not cost a minute.
    if result := ended_for_all(processes, config, out, force=force, resume=resume):
        with shown(log, show_note) as tell:
            tell(Note(f"the run in {str(out)!r} has ended; nothing is left to do"))
            tell(RunEnded(result))
    else:
        try:
            workload = prepare(config)
            if log in ("auto", "lines"):
                show_clients(workload)
            with shown(log, show_note) as tell:
                result = api.run(config, out, force=force, resume=resume, tell=tell, workload=workload)
        except api.AllFailed as error:
            result = error.result
        except KeyboardInterrupt as stop:
            said = stop if isinstance(stop, Interrupted) else Interrupted("stopped before the training began")
            if launch.speaks(said):
                typer.echo(f"pf2lora: {said}", err=True)
            raise typer.Exit(said.code) from None
    launch.leave()
    if not processes.first:
        raise typer.Exit(2 if result.failed else 0)
    if log != "json":
        show_result(result, out)
    end(result)


def end(result: Result) -> None:
    """Where a method failed, a line for each on standard error and exit code 2."""
    for name, why in result.failed.items():
        typer.echo(f"pf2lora: {result.methods[name].label} failed: {why}", err=True)
    if result.failed:
        raise typer.Exit(2)
