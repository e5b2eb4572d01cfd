"""The command line: one file per group of commands; nothing here imports torch before a command runs."""

from __future__ import annotations

import sys

import typer

from pf2lora.cli import data, federation, reproduce, score
from pf2lora.cli.demo import demo
from pf2lora.cli.generate import generate
from pf2lora.cli.init import init_command
from pf2lora.cli.methods import methods
from pf2lora.cli.options import ListCommand
from pf2lora.cli.predict import predict
from pf2lora.cli.push import push
from pf2lora.cli.report import report
from pf2lora.cli.serve import serve
from pf2lora.cli.sweep import sweep
from pf2lora.cli.train import compare, train
from pf2lora.cli.use import evaluate, export, onboard
from pf2lora.errors import UserError, one_line
from pf2lora.run.launch import check_alone, quiet_torch, speaks

SHARED = ("train", "compare")  # what several processes may do together

app = typer.Typer(
    help="Personalized federated LoRA fine-tuning of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="Run")(demo)
app.command("init", cls=ListCommand, rich_help_panel="Run")(init_command)
app.command(cls=ListCommand, rich_help_panel="Run")(train)
app.command(cls=ListCommand, rich_help_panel="Run")(compare)
app.command(cls=ListCommand, rich_help_panel="Run")(sweep)
app.add_typer(reproduce.app, name="reproduce", rich_help_panel="Run")
app.add_typer(federation.app, name="federation", rich_help_panel="Run")
app.command(rich_help_panel="Use a run")(predict)
app.command(rich_help_panel="Use a run")(generate)
app.command(rich_help_panel="Use a run")(evaluate)
app.command(rich_help_panel="Use a run")(onboard)
app.command(rich_help_panel="Use a run")(export)
app.command(rich_help_panel="Use a run")(push)
app.command(rich_help_panel="Use a run")(serve)
app.command(rich_help_panel="Use a run")(report)
app.command(rich_help_panel="Look")(methods)
app.add_typer(data.app, name="data", rich_help_panel="Look")
app.add_typer(score.app, name="score", rich_help_panel="Look")


def version(show: bool) -> None:
    if show:
        from pf2lora import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Personalized federated LoRA fine-tuning of language models."""
    command = context.invoked_subcommand
    if command == "federation":
        check_alone("a site or a server", "a site starts others by itself (processes in its site.toml)")
    elif command not in SHARED:
        check_alone(f"pf2lora {command}", f"torchrun shares the clients of {' and '.join(SHARED)} alone")


def main() -> None:
    """Bad input is one line on standard error and exit code 2."""
    quiet_torch()
    try:
        app()
    except UserError as error:
        if speaks(error):
            print(f"pf2lora: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
