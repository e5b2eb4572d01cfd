"""`pf2lora reproduce synthetic` and `theorem`: the paper's two small experiments, on any machine in minutes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pf2lora.atomic import check_writable, make_folder, write_text
from pf2lora.cli.options import WRITTEN
from pf2lora.errors import UserError

if TYPE_CHECKING:
    from pf2lora.reproduce.summary import Quartiles, Summary

POINTS = {"served": "served", "before_averaging": "before"}

Seed = Annotated[int, typer.Option("--seed", help="The first seed.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from --seed on.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is in the folder.")]


def synthetic(
    out: Annotated[Path, typer.Option("--out", help="Folder of the result.", **WRITTEN)] = Path(
        "runs/synthetic"
    ),
    seed: Seed = 0,
    seeds: Seeds = 1,
    upper: Annotated[str, typer.Option("--upper", help="Optimizer of x: sgd or adamw.")] = "sgd",
    noise: Annotated[
        str, typer.Option("--noise", help="N(0, v): v is the variance or deviation.")
    ] = "variance",
    steps: Annotated[int, typer.Option("--steps", help="Training steps (the paper: 2000).")] = 2000,
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", help="Run every method with tuned rates too, tuned alike.")
    ] = True,
    force: Force = False,
) -> None:
    """Figure 2: PF2LoRA and HETLoRA on two clients' low-rank regressions, with the paper's rates and tuned ones."""
    files = _free(out, "synthetic", force)
    from pf2lora.reproduce.comparison import count_runs, make_plans, run_seed
    from pf2lora.reproduce.figures import draw_synthetic
    from pf2lora.reproduce.summary import summarize
    from pf2lora.reproduce.synthetic import Settings
    from pf2lora.reproduce.tuning import TUNING_RUNS, Tuning, check_apart, tune_all
    from pf2lora.run.progress import track

    settings = Settings(upper=upper, noise=noise, steps=steps)
    reported = range(seed, seed + seeds)
    tuning: dict[str, Tuning] = {}
    if tune:
        check_apart(reported)
        with track(TUNING_RUNS, "synthetic, tuning runs") as advance:
            tuning = tune_all(settings, advance)
    plans = make_plans(settings, tuning)
    with track(seeds * count_runs(plans), "synthetic, runs") as advance:
        runs = [run_seed(s, settings, plans, advance) for s in reported]
    result = summarize(runs, settings, tuning)
    _write(asdict(result), files[0])
    draw_synthetic(result, out)
    _print_synthetic(result, Console())
    _name(files)


def theorem(
    out: Annotated[Path, typer.Option("--out", help="Folder of the result.", **WRITTEN)] = Path(
        "runs/theorem"
    ),
    seed: Seed = 0,
    seeds: Seeds = 5,
    condition: Annotated[float, typer.Option("--condition", help="Condition number L/µ.")] = 5.0,
    steps: Annotated[int, typer.Option("--steps", help="The largest T.")] = 30_000,
    force: Force = False,
) -> None:
    """The O(1/T) theorem and its lemma on the hypergradient's bias, measured on strongly convex quadratics."""
    files = _free(out, "theorem", force)
    from pf2lora.reproduce.figures import draw_theorem
    from pf2lora.reproduce.theorem import Settings, run
    from pf2lora.run.progress import track

    settings = Settings(condition=condition, steps=steps)
    with track(steps, "theorem, steps") as advance:
        result = run(list(range(seed, seed + seeds)), settings, advance)
    _write(result, files[0])
    draw_theorem(result, out)
    _print_theorem(result, Console())
    _name(files)


def _free(folder: Path, name: str, force: bool) -> list[Path]:
    """The files of a result, found out before the work to be writable and not to overwrite anything."""
    files = [folder / f"{name}.{kind}" for kind in ("json", "svg", "png")]
    existing = [file for file in files if file.exists()]
    if existing and not force:
        raise UserError(
            f"{existing[0]} exists already: name another folder with --out, or overwrite it with --force"
        )
    check_writable(make_folder(folder))
    return files


def _write(result: dict[str, Any], file: Path) -> None:
    write_text(file, json.dumps(_rounded(result), allow_nan=False, separators=(",", ":")) + "\n")


def _rounded(value: Any) -> Any:
    """Seven digits are more than any figure shows, and half the file."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


def _name(files: list[Path]) -> None:
    Console().print(*files, sep="\n", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right")
    return table


def _print_synthetic(result: Summary, console: Console) -> None:
    from pf2lora.reproduce.figures import ROWS

    count = len(result.seeds)
    title = f"step {result.steps[-1]}, {result.settings.upper} above, "
    title += f"median and quartiles of {count} seeds" if count > 1 else f"seed {result.seeds[0]}"
    table = _table(title, "client", "measured", "test loss", "‖Ŵ−W*‖/‖W*‖ %", "rank", "= W*'s")
    for method, label in ROWS.items():
        best = result.optimum[method]
        for k in range(len(result.clients)):
            for point in POINTS:
                for rates, final in result.final[method].items():
                    end = final[point]
                    rank = [f"{end.metrics['rank'].median[k]:g}", f"{end.rank_right[k]}/{count}"]
                    cells = [*_cells(end.metrics, k), *rank]
                    table.add_row(f"{label} {k + 1}", f"{POINTS[point]}, {rates}", *cells)
            name = f"RRR, ≤ {best.rank_limit[k]}"
            table.add_row(f"{label} {k + 1}", name, *_cells(best.metrics, k), style="dim")
    console.print(table)
    floor = 100 * median(run.truth.served_floor for run in result.runs)
    notes = [
        "served: after averaging; before: before it",
        *_rate_notes(result),
        *_diverged_notes(result),
        f"PF2LoRA served: both clients together at least {floor:.1f} % (median) at any rates",
        "RRR: the client's own reduced-rank regression at the highest rank it starts with",
        "= W*'s: seeds whose learned rank is that of W* by the same 90% rule",
    ]
    console.print("\n".join(notes), highlight=False, style="dim")


def _rate_notes(result: Summary) -> list[str]:
    """Which rates stand behind "paper" and "tuned"."""
    from pf2lora.reproduce.figures import ROWS

    paper = (f"{label} {_rates(result.settings.rates(method))}" for method, label in ROWS.items())
    notes = [f"paper: the paper's rates, {', '.join(paper)}"]
    if result.tuning:
        tuning = next(iter(result.tuning.values()))
        seeds = ", ".join(map(str, tuning.seeds))
        notes.append(
            f"tuned: per point, best of {len(tuning.tries)} tries by validation loss on seeds {seeds}"
        )
    for method, tuning in result.tuning.items():
        chosen = (
            f"{POINTS[point]} {_rates(result.settings.scaled(method, factor).rates(method))}"
            for point, factor in tuning.chosen.items()
        )
        notes.append(f"  {ROWS[method]} {', '.join(chosen)}")
    return notes


def _diverged_notes(result: Summary) -> list[str]:
    from pf2lora.reproduce.figures import ROWS

    return [
        f"{ROWS[method]}, {POINTS[point]}, {rates}: {end.diverged} seeds diverged; quartiles are of the others"
        for method, of_method in result.final.items()
        for rates, points in of_method.items()
        for point, end in points.items()
        if end.diverged
    ]


def _rates(rates: dict[str, float]) -> str:
    return " and ".join(f"{rate:g}" for rate in rates.values())


def _cells(metrics: dict[str, Quartiles], k: int) -> list[str]:
    return [_spread(metrics["test_loss"], k), _spread(metrics["relative_distance"], k, _percent)]


def _percent(share: float) -> str:
    """One decimal up to 100 %, none above."""
    return f"{100 * share:.1f}" if share < 0.9995 else f"{100 * share:.0f}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _spread(values: Quartiles, k: int, written: Callable[[float], str] = _three_digits) -> str:
    low, middle, high = (written(of_clients[k]) for of_clients in (values.q1, values.median, values.q3))
    return middle if low == middle == high else f"{middle} ({low}–{high})"


def _print_theorem(result: dict[str, Any], console: Console) -> None:
    constants = result["constants"]
    title = f"T = {result['T'][-1]}, L/µ = {result['settings']['condition']:g}, "
    title += f"α = {constants['alpha']:.3g}, η = {constants['eta']:.3g}"
    table = _table(
        title, "seed", "mean ‖∇Φ‖²", "bound", "slope", "bias / its bound", "contraction / its bound"
    )
    for i, seed in enumerate(result["seeds"]):
        bound = "none" if result["bound"] is None else f"{result['bound'][i] / result['T'][-1]:.3g}"
        table.add_row(
            str(seed),
            f"{result['mean_squared_gradient'][i][-1]:.3g}",
            bound,
            f"{result['slope_last_decade'][i]:.2f}",
            f"{result['bias_ratio'][i]:.3f}",
            f"{result['contraction_ratio'][i]:.3f}",
        )
    console.print(table)
    console.print(
        "slope: over the last decade of T; the two ratios: the largest over all steps (at most 1 if the lemmas hold)",
        highlight=False,
        style="dim",
    )
