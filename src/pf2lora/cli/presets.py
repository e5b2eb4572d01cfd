"""The command that every preset has: train what it describes, and show the paper's numbers beside the run's own."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pf2lora.atomic import check_writable, make_folder, write_json, write_text, writing
from pf2lora.cli.options import WRITTEN, Choice, choices, with_settings
from pf2lora.cli.text import safe
from pf2lora.errors import UserError, one_line
from pf2lora.folder_lock import locked
from pf2lora.reproduce.preset import Preset, to_toml
from pf2lora.reproduce.presets import load_preset
from pf2lora.run.config import in_tables
from pf2lora.run.config import to_toml as config_toml

if TYPE_CHECKING:
    from pf2lora.reproduce.tables import Finding

SETTINGS = (
    *("model", "data_dir", "method", "rounds", "steps", "batch_size", "seed", "seeds", "device", "precision"),
    *("limit", "num_clients", "hypergradient_mode", "clients_per_pass", "evaluate_every", "head", "compile"),
)
"""What may be set over a preset; anything else is an edit of its copy (`--print-config`)."""

Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", help="Only this run of the preset, or this one at every value; may be given several times."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder of the results (default: runs/ and the name).", show_default=False, **WRITTEN
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Do everything anew, replacing what is in the folder.")]
Search = Annotated[
    bool, typer.Option("--grid", help="Search the rates on the paper's grid first, alike for every method.")
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Show the preset as TOML, to be edited and run; with one --only, that run's config for compare.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what would run, what is missing and how long it takes; train nothing."
    ),
]


def command_for(name: str) -> Callable[..., None]:
    """The command of a preset."""

    def command(
        settings: dict[str, Any],
        only: Only = None,
        out: Out = None,
        grid: Search = False,
        force: Force = False,
        print_config: PrintConfig = False,
        dry_run: DryRun = False,
    ) -> None:
        execute(
            name,
            settings,
            only=only or [],
            out=out,
            grid=grid,
            force=force,
            print_config=print_config,
            dry_run=dry_run,
        )

    command.__name__ = name
    return with_settings(command, _given())


def command_for_files() -> Callable[..., None]:
    """The command of a path: a preset of the user's own."""

    def command(
        settings: dict[str, Any],
        file: str,
        only: Only = None,
        out: Out = None,
        grid: Search = False,
        force: Force = False,
        print_config: PrintConfig = False,
        dry_run: DryRun = False,
    ) -> None:
        """A preset from a file."""
        execute(
            file,
            settings,
            only=only or [],
            out=out,
            grid=grid,
            force=force,
            print_config=print_config,
            dry_run=dry_run,
        )

    hint = Annotated[str, typer.Argument(help="A preset of your own: an edited copy of one.")]
    file = inspect.Parameter("file", inspect.Parameter.KEYWORD_ONLY, annotation=hint)
    return with_settings(command, _given(), file)


@cache
def _given() -> list[Choice]:
    known = choices()
    return [known[name] for name in SETTINGS]


def execute(
    name: str,
    settings: dict[str, Any],
    *,
    only: list[str],
    out: Path | None,
    grid: bool,
    force: bool,
    print_config: bool,
    dry_run: bool,
) -> None:
    """Run a preset, or show it."""
    paper = load_preset(name).only(only)
    preset = paper.with_settings(in_tables(settings, "command line"))
    if print_config:
        alone = preset.runs[0].config if only and len(preset.runs) == 1 and not preset.counted else None
        typer.echo(to_toml(preset) if alone is None else config_toml(alone), nl=False)
        return
    if grid and preset.grid is None:
        raise UserError(f"{preset.name} has no grid: its rates are those of the preset that it is like")
    folder = out or Path("runs") / preset.name
    if dry_run:
        from pf2lora.cli.reproduce_dry_run import show_preset

        show_preset(preset, folder, grid=grid, force=force)
        return
    if not preset.counted:
        from pf2lora.cli.show import quiet_libraries

        quiet_libraries()
    with locked(folder):
        claim(folder, preset, force)
        findings = find(preset, folder, grid=grid, model=settings.get("model"))
        show(paper, preset, findings, folder)


def claim(folder: Path, preset: Preset, force: bool) -> None:
    """The folder, found out before the work to be writable; with `force`, without what these runs left there."""
    check_writable(folder)
    with writing(folder):
        for run in preset.runs if force else ():
            for left in ("result.json", "grid.json"):
                (folder / run.name / left).unlink(missing_ok=True)
            shutil.rmtree(folder / run.name / "parts", ignore_errors=True)
        make_folder(folder)


def find(preset: Preset, folder: Path, *, grid: bool, model: str | None) -> list[Finding]:
    """Every run of the preset, one after the other."""
    from pf2lora.reproduce.grid import search
    from pf2lora.reproduce.running import execute as execute_run
    from pf2lora.reproduce.tables import Finding
    from pf2lora.run.tries import with_rates

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def tell(line: str) -> None:
        console.print(one_line(line), style="dim")

    found = []
    for number, run in enumerate(preset.runs, 1):
        if run.shape:
            from pf2lora.reproduce.shapes import count

            found.append(Finding(run, counted=count(run, model)))
            continue
        console.print(f"{preset.name}, run {number} of {len(preset.runs)}: {run.label}")
        searches = []
        if grid and preset.grid is not None:
            searches = search(preset.grid, run, folder / run.name, tell)
            chosen = {s.method: s.chosen for s in searches}
            run = replace(run, config=with_rates(run.config, chosen))
        prompts = [example.prompt for example in preset.examples]
        result, diverged = execute_run(run, folder / run.name, tell, prompts)
        found.append(Finding(run, result, searches=searches, diverged=diverged))
    return found


def show(paper: Preset, preset: Preset, findings: list[Finding], folder: Path) -> None:
    """Print the table, and write it, everything else and the figure beside it."""
    from pf2lora.reproduce import charts, page, tables

    console = Console(highlight=False)
    title = page.heading(paper, preset)
    console.print(f"[bold]{safe(title)}[/bold]: {safe(preset.source)}", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = tables.head(findings)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < 3 else "right", overflow="fold")
    lines = tables.cells(findings)
    for line, after in zip(lines, [*lines[1:], None]):
        ends = after is None or (line[0], line[2]) != (after[0], after[2])
        table.add_row(*map(safe, line), end_section=ends)
    console.print(table)
    notes = [*page.setting_lines(paper, findings), *preset.notes, *page.rate_lines(findings)]
    notes += [line for finding in findings for line in finding.diverged]
    for note in notes:
        console.print(safe(note), style="dim", soft_wrap=True)
    for text in page.example_lines(preset, findings):
        console.print(safe(text.replace("**", "")), soft_wrap=True)
    figures = charts.draw(preset, findings, folder, title)
    written = [folder / f"{preset.name}.json", folder / f"{preset.name}.md"]
    write_json(written[0], page.to_json(paper, preset, findings))
    write_text(written[1], page.markdown(paper, preset, findings, [file.name for file in figures]))
    console.print(*(safe(str(file)) for file in (*written, *figures)), sep="\n", soft_wrap=True)
