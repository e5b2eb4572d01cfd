"""`pf2lora report RUN…`: write a run's report again, or compare several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pf2lora.cli.options import WRITTEN
from pf2lora.errors import UserError, check_path, reading

FILE = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders. One: its report; several: a comparison.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write (default: RUN/report.html for one run, ./report.html for several).",
            **WRITTEN,
        ),
    ] = None,
) -> None:
    """Write a run's report.html again, or compare several runs in one page."""
    from pf2lora.report import build
    from pf2lora.run.result import load_result

    loaded = [load_result(run) for run in runs]
    target = _target(runs, out)
    names = [(run if run.is_dir() else run.parent).resolve().name for run in runs]
    typer.echo(str(build(loaded, target, names)))


def _target(runs: list[Path], out: Path | None) -> Path:
    """Where to write. A file that is not a report of ours is never replaced."""
    from pf2lora.report import is_ours

    with reading(check_path(runs[0]), "run folder"):
        one = runs[0] if runs[0].is_dir() else runs[0].parent
    target = out or (one / FILE if len(runs) == 1 else Path(FILE))
    with reading(check_path(target)):
        if target.is_dir():
            raise UserError(f"{target}: a folder; --out names the file to write, such as {target / FILE}")
        if target.exists() and not is_ours(target):
            raise UserError(f"{target}: exists and is not a report of pf2lora; name another file with --out")
    return target
