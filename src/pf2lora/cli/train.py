"""`pf2lora train` and `pf2lora compare`: federate a model over clients' files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pf2lora.cli.options import WRITTEN, configured, read_config
from pf2lora.errors import UserError
from pf2lora.methods import SETS
from pf2lora.run.config import Config, to_commented_toml
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


def running(
    name: str, about: str, methods: Callable[[dict[str, Any], Config], Sequence[str]], **defaults: str
) -> Callable[..., None]:
    """The command that trains the `methods` of what it is given, into runs/NAME where nothing else is said."""

    def command(
        settings: dict[str, Any],
        file: Path | None,
        out: OutIfGiven = None,
        force: Force = False,
        resume: Resume = False,
        print_config: PrintConfig = False,
        dry_run: DryRun = False,
        log: Log = "auto",
    ) -> None:
        config = read_config(settings, file)
        chosen = tuple(methods(settings, config))
        config = replace(config, training=replace(config.training, method=chosen))
        out = out or Path(config.output.out or f"runs/{name}")
        execute(config, out, force, print_config, resume=resume, dry_run=dry_run, log=log)

    command.__name__, command.__doc__ = name, about
    return configured(command, **defaults)


def one_method(settings: dict[str, Any], config: Config) -> Sequence[str]:
    """What `train` trains."""
    if len(config.training.method) > 1:
        raise UserError("train takes one method; 'pf2lora compare' takes several")
    return config.training.method


def several_methods(settings: dict[str, Any], config: Config) -> Sequence[str]:
    """What `compare` trains: the paper's methods where none is named."""
    named = "method" in settings or config.training.method != Config().training.method
    return config.training.method if named else SETS["paper"]


train = running(
    "train", "Train one method on your clients' files; write adapters, scores and a report.", one_method
)
compare = running(
    "compare",
    "Train several methods (by default those of the paper) on the same clients and seeds, and compare them.",
    several_methods,
    method="paper",
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
    from pf2lora.cli.show import quiet_libraries, show_clients, show_note, show_result
    from pf2lora.run import api, launch
    from pf2lora.run.interruption import Interrupted

    quiet_libraries()
    processes = launch.join(config.model.device)
    try:
        result = api.run_shown(
            config,
            out,
            log=log,
            on_note=show_note,
            force=force,
            resume=resume,
            on_workload=show_clients if log in ("auto", "lines") else lambda workload: None,
        )
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
