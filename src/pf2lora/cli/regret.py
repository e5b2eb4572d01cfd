"""`pf2lora reproduce regret`: every method on tasks of every kind, and how far each falls behind the best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pf2lora.atomic import write_text
from pf2lora.cli.options import WRITTEN, spread_lists
from pf2lora.errors import UserError
from pf2lora.folder_lock import locked

LISTS = {"--tasks", "--variants", "--read"}


class RegretCommand(TyperCommand):
    """`--tasks a b c` for `--tasks a --tasks b --tasks c`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_lists(args, LISTS))


def regret(
    model: Annotated[str, typer.Option("--model", help="The encoder: a hub name or a folder.")] = "",
    generation_model: Annotated[
        str, typer.Option("--generation-model", help="The causal language model, for the generation tasks.")
    ] = "",
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="The folder of all data sets (docs/regret.md).")
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--tasks", help="Only these tasks (default: all whose data is there).")
    ] = None,
    variants: Annotated[
        list[str] | None, typer.Option("--variants", help="Only these variants, or sets of methods.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from --seed on.")] = 3,
    tries: Annotated[
        int, typer.Option("--tries", help="Rates that each tuned variant tries (1: its defaults).")
    ] = 3,
    outward: Annotated[
        int,
        typer.Option(
            "--outward", help="Further rates at most, one by one, while the best tried is at an end."
        ),
    ] = 2,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Rounds of every task (default: the task's).")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="float32, bfloat16, or auto: bfloat16 where CUDA has it.")
    ] = "auto",
    minutes: Annotated[
        float, typer.Option("--minutes", help="Begin no run that would end later than this.")
    ] = float("inf"),
    out: Annotated[Path, typer.Option("--out", help="Folder of the result.", **WRITTEN)] = Path(
        "runs/regret"
    ),
    read: Annotated[
        list[Path] | None,
        typer.Option("--read", help="Run nothing: merge these files of finished runs into --out."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Name the tasks and variants, and stop.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would run, what is missing and how long it takes; train nothing."
        ),
    ] = False,
) -> None:
    """Beside the paper: how far each method falls behind the best one, on tasks of every kind.

    A line per finished run goes to OUT/regret.jsonl; the same command goes on where it was stopped.
    """
    if show:
        _list()
        return
    from pf2lora.reproduce.regret import records

    if read:
        own = out / records.FILE
        merged = records.read([*([own] if own.exists() else []), *read])
        records.write(merged.values(), out)
        _show(out)
        return
    if data_dir is None or not model:
        raise UserError("the benchmark needs --model and --data-dir (or --read, for runs that are finished)")
    from pf2lora.cli.show import console, quiet_libraries
    from pf2lora.reproduce.regret.runs import Plan, execute_all, order
    from pf2lora.reproduce.regret.tasks import choose_tasks
    from pf2lora.reproduce.regret.variants import check_tries, choose_variants

    quiet_libraries()
    check_tries(tries, outward)
    chosen, left_out = choose_tasks(tasks or [], data_dir, generation=bool(generation_model))
    over: dict[str, Any] = {"device": device, "precision": precision}
    if rounds is not None:
        over["rounds"] = rounds
    plan = Plan(model, generation_model, data_dir, out / "data", seed, seeds, tries, outward, over)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    if dry_run:
        from pf2lora.cli.reproduce_dry_run import show_regret

        show_regret(plan, order(chosen, choose_variants(variants or [])), left_out, out)
        return
    for line in left_out:
        say(f"left out: {line}")
    todo = order(chosen, choose_variants(variants or []))
    try:
        with locked(out):
            failures = execute_all(plan, todo, out, seconds=60 * minutes, say=say)
    except KeyboardInterrupt:
        say(
            f"stopped; the finished runs are in {out / records.FILE}, and the same command goes on from there"
        )
        raise typer.Exit(130) from None
    if (out / records.FILE).exists():
        _show(out)
    if failures:
        raise UserError(f"{len(failures)} runs failed, the first: {failures[0]}")


def _list() -> None:
    from pf2lora.reproduce.regret.tasks import TASKS
    from pf2lora.reproduce.regret.variants import variants

    for heading, named in (
        ("tasks", {name: task.title for name, task in TASKS.items()}),
        ("variants", {name: variant.label for name, variant in variants().items()}),
    ):
        typer.echo(f"{heading}:")
        for name, title in named.items():
            typer.echo(f"  {name:18} {title}")


def _show(out: Path) -> None:
    """The table and the figure of the runs that `out` has."""
    from pf2lora.reproduce.regret import records
    from pf2lora.reproduce.regret.show import draw, markdown
    from pf2lora.reproduce.regret.summary import summarize

    runs = records.read([out / records.FILE])
    summaries = summarize(runs)
    if not summaries:
        raise UserError(f"{out / records.FILE}: no run in it has a score")
    text = markdown(summaries, runs)
    write_text(out / "regret.md", text)
    files = [out / records.FILE, out / "regret.md", *draw(summaries, out)]
    typer.echo(text)
    typer.echo("\n".join(map(str, files)))
