"""The pictures of the paper's small experiments, for print and screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pf2lora.atomic import write_figure
from pf2lora.data.figure import INK, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pf2lora.reproduce.summary import Summary

KINDS = ("svg", "png")
DASHED, DOTTED = (0, (5, 3)), (0, (1, 1.4))
COLOURS = (PALETTE[0], PALETTE[5])  # client 1, client 2
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.edgecolor": "#8A9299",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "pf2lora",  # same data, same file
}
PANELS = {
    "train_loss": "Training loss",
    "test_loss": "Test loss",
    "distance": r"Distance $\|\hat{W}_k - W_k^*\|_F$",
    "rank": "Rank (90% rule)",
}
ROWS = {"hetlora": "HETLoRA", "pf2lora": "PF2LoRA"}


def draw_synthetic(result: Summary, folder: Path) -> list[Path]:
    """The paper's Figure 2: four panels for each method and choice of rates, median and quartiles over the seeds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = [(method, rates) for method in ROWS for rates in result.curves[method]]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.6, 1.2 + 2.2 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(PANELS), sharex=True, sharey="col", squeeze=False)
        for row, (method, rates) in zip(grid, rows):
            for axes, metric in zip(row, PANELS):
                _draw_panel(axes, result, method, rates, metric)
            row[0].set_ylabel(_row_label(result, method, rates), fontweight="bold")
        for axes, title in zip(grid[0], PANELS.values()):
            axes.set_title(title, loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("step")
        _synthetic_legend(figure, result)
        return save(figure, folder, "synthetic")


def _row_label(result: Summary, method: str, rates: str) -> str:
    if rates == "paper":
        return f"{ROWS[method]}\npaper's rates"
    chosen = result.tuning[method].chosen
    served, before = (f"{chosen[point]:g}" for point in ("served", "before_averaging"))
    times = f"× {served}" if served == before else f"× {served}, dotted × {before}"
    return f"{ROWS[method]}, tuned\n{times}"


def _draw_panel(axes: Axes, result: Summary, method: str, rates: str, metric: str) -> None:
    steps = result.steps
    served, before = (result.curves[method][rates][point][metric] for point in ("served", "before_averaging"))
    for k, colour in enumerate(COLOURS):
        apart = 0.05 * (2 * k - 1) if metric == "rank" else 0.0  # clients of the same rank stay visible
        low, middle, high, dotted = (
            np.array(values)[:, k] + apart for values in (served.q1, served.median, served.q3, before.median)
        )
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, middle, color=colour, linewidth=1.6)
        axes.plot(steps, dotted, color=colour, linewidth=1.1, linestyle=DOTTED)
        if metric != "rank":
            best = result.optimum[method].metrics[metric].median[k]
            axes.axhline(best, color=colour, linewidth=1, linestyle=DASHED)
    if metric == "rank":
        _draw_true_ranks(axes, result)
        axes.set_yticks(range(0, 7))
        axes.set_ylim(-0.2, 6.3)
    else:
        axes.set_yscale("log")
    axes.set_xlim(steps[0], steps[-1])
    plain(axes)


def _draw_true_ranks(axes: Axes, result: Summary) -> None:
    """W*_k's own rank by the same rule: a mark at the right edge, at its median over the seeds."""
    ranks = np.median([run.truth.rank_90 for run in result.runs], axis=0)
    together = ranks[0] == ranks[1]
    for k, colour in enumerate(COLOURS):
        size = 9 if together and k == 0 else 6  # one inside the other where they agree
        mark: Any = {"marker": "D", "markersize": size, "color": colour, "clip_on": False, "zorder": 5}
        axes.plot([result.steps[-1]], [ranks[k]], **mark)


def _synthetic_legend(figure: Figure, result: Summary) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    het, pf2 = (result.optimum[method].rank_limit for method in ("hetlora", "pf2lora"))
    limits = f"rank ≤ {het[0]} and {het[1]} for HETLoRA, {pf2[0]} for PF2LoRA"

    def line(label: str, **style: Any) -> Line2D:
        return Line2D([], [], label=label, **{"color": INK} | style)

    handles: list[Any] = [
        *(line(f"client {k}", color=colour, linewidth=3) for k, colour in enumerate(COLOURS, 1)),
        line("served (after averaging)", linewidth=1.6),
        line("before averaging", linewidth=1.1, linestyle=DOTTED),
        line(f"optimum: reduced-rank regression ({limits})", linewidth=1, linestyle=DASHED),
        line(r"rank of $W_k^*$ by the same rule", marker="D", markersize=6, linestyle=""),
    ]
    seeds = len(result.seeds)
    if seeds > 1:
        handles.append(Patch(color=INK, alpha=0.18, linewidth=0, label=f"quartiles of {seeds} seeds"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)


def draw_theorem(result: dict[str, Any], folder: Path) -> list[Path]:
    """Mean squared gradient norm against T with the O(1/T) line, and the hypergradient's bias under its bound."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.2, 4.2), layout="constrained")
        rate, bias = figure.subplots(1, 2)
        _draw_rate(rate, result)
        _draw_bias(bias, result)
        for axes in (rate, bias):
            axes.set(xscale="log", yscale="log", xlim=(1, result["T"][-1]))
            axes.legend(frameon=False, loc="upper right")
            plain(axes)
        return save(figure, folder, "theorem")


def _draw_rate(axes: Axes, result: dict[str, Any]) -> None:
    T = np.array(result["T"])
    means = result["mean_squared_gradient"]
    if result["bound"] is not None:
        bound = max(result["bound"]) / T
        axes.plot(T, bound, color=COLOURS[1], linewidth=1.3, linestyle=DASHED, label="bound $G/T$")
    _draw_problems(axes, T, means, _count(len(result["seeds"]), "problem"))
    late = T[-(len(T) // 3) :]
    anchor = 2 * max(mean[-1] for mean in means) * T[-1]
    axes.plot(late, anchor / late, color=INK, linewidth=1, linestyle=DOTTED, label="slope −1")
    axes.set_title(r"Mean of $\|\nabla\Phi(x^t)\|^2$ over $t < T$", loc="left")
    axes.set_xlabel("$T$")


def _draw_bias(axes: Axes, result: dict[str, Any]) -> None:
    T = np.array(result["T"])
    for i, bound in enumerate(result["bias_bound"]):
        label = r"bound $L(1+\alpha L)\sqrt{1-\alpha\mu}\,\|y^t-y^*(x^t)\|$" if i == 0 else None
        axes.plot(T, bound, color=COLOURS[1], linewidth=1.1, linestyle=DASHED, label=label)
    _draw_problems(axes, T, result["bias"], _count(len(result["seeds"]), "problem"))
    axes.set_title(r"Hypergradient's bias $\|\nabla\hat{\Phi}(x^t)-\nabla\Phi(x^t)\|$", loc="left")
    axes.set_xlabel("$t$")


def _draw_problems(axes: Axes, T: np.ndarray, curves: list[list[float]], label: str) -> None:
    for i, curve in enumerate(curves):
        name = f"measured, {label}" if i == 0 else None
        axes.plot(T, curve, color=COLOURS[0], linewidth=1.4, alpha=0.8, label=name)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E6E8", linewidth=0.6)
    axes.set_axisbelow(True)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    files = [folder / f"{name}.{kind}" for kind in KINDS]
    for file in files:
        write_figure(file, figure, dpi=180)
    return files
