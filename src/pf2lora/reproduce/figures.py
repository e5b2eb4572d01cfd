"""The pictures of the paper's small experiments, for print and screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pf2lora.data.figure import INK, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("svg", "png")
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


def draw_synthetic(result: dict[str, Any], folder: Path) -> list[Path]:
    """The paper's Figure 2: four panels for each method, median and quartiles over the seeds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.6, 5.6), layout="constrained")
        grid = figure.subplots(len(ROWS), len(PANELS), sharex=True, sharey="col", squeeze=False)
        for row, (method, label) in zip(grid, ROWS.items()):
            for axes, (metric, title) in zip(row, PANELS.items()):
                _draw_panel(axes, result, method, metric)
                axes.set_title(title if method == next(iter(ROWS)) else "", loc="left")
            row[0].set_ylabel(label, fontweight="bold", fontsize=10.5)
        for axes in grid[-1]:
            axes.set_xlabel("step")
        _synthetic_legend(figure, result)
        return _save(figure, folder, "synthetic")


def _draw_panel(axes: Axes, result: dict[str, Any], method: str, metric: str) -> None:
    steps = result["steps"]
    curves = result["curves"][method]
    for k, colour in enumerate(COLOURS):
        served, before = (
            {q: np.array(values)[:, k] for q, values in curves[point][metric].items()}
            for point in ("served", "before_averaging")
        )
        axes.fill_between(steps, served["q1"], served["q3"], color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, served["median"], color=colour, linewidth=1.6)
        axes.plot(steps, before["median"], color=colour, linewidth=1.1, linestyle=(0, (1, 1.4)))
        if metric != "rank":
            axes.axhline(
                result["optimum"][method][metric]["median"][k],
                color=colour,
                linewidth=1,
                linestyle=(0, (5, 3)),
            )
    if metric == "rank":
        _draw_true_ranks(axes, result)
        axes.set_yticks(range(0, 7))
        axes.set_ylim(-0.2, 6.3)
    else:
        axes.set_yscale("log")
    axes.set_xlim(steps[0], steps[-1])
    _plain(axes)


def _draw_true_ranks(axes: Axes, result: dict[str, Any]) -> None:
    """W*_k's own rank by the same rule: a mark at the right edge, at its median over the seeds."""
    ranks = np.median([run["truth"]["rank_90"] for run in result["runs"]], axis=0)
    together = ranks[0] == ranks[1]
    for k, colour in enumerate(COLOURS):
        size = 9 if together and k == 0 else 6  # one inside the other where they agree
        axes.plot(
            [result["steps"][-1]],
            [ranks[k]],
            marker="D",
            markersize=size,
            color=colour,
            clip_on=False,
            zorder=5,
        )


def _synthetic_legend(figure: Figure, result: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    het, pf2 = (result["optimum"][method]["rank_limit"] for method in ("hetlora", "pf2lora"))
    limits = f"HETLoRA {het[0]} and {het[1]}, PF2LoRA {pf2[0]}"
    handles: list[Any] = [
        *(Line2D([], [], color=c, linewidth=3, label=f"client {k}") for k, c in enumerate(COLOURS, 1)),
        Line2D([], [], color=INK, linewidth=1.6, label="served (after averaging)"),
        Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (1, 1.4)), label="before averaging"),
        Line2D(
            [],
            [],
            color=INK,
            linewidth=1,
            linestyle=(0, (5, 3)),
            label=f"reduced-rank regression, closed form (rank ≤ {limits})",
        ),
        Line2D([], [], color=INK, marker="D", markersize=6, linestyle="", label=r"rank of $W_k^*$"),
    ]
    seeds = len(result["seeds"])
    if seeds > 1:
        handles.append(Patch(color=INK, alpha=0.18, linewidth=0, label=f"quartiles of {seeds} seeds"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)


def draw_theorem(result: dict[str, Any], folder: Path) -> list[Path]:
    """Mean squared gradient norm against T on log axes, with the O(1/T) line."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 4.4), layout="constrained")
        axes = figure.subplots()
        T = np.array(result["T"])
        for i, means in enumerate(result["mean_squared_gradient"]):
            label = f"measured, {_count(len(result['seeds']), 'problem')}" if i == 0 else None
            axes.plot(T, means, color=PALETTE[0], linewidth=1.5, alpha=0.8, label=label)
        if result["bound"] is not None:
            label = r"the proof's bound $G/T$ (largest of the problems)"
            axes.plot(
                T,
                max(result["bound"]) / T,
                color=PALETTE[5],
                linewidth=1.3,
                linestyle=(0, (5, 3)),
                label=label,
            )
        late = T[-(len(T) // 3) :]
        anchor = max(means[-1] for means in result["mean_squared_gradient"]) * 2 * T[-1]
        axes.plot(late, anchor / late, color=INK, linewidth=1, linestyle=(0, (1, 1.4)), label="slope −1")
        axes.set(xscale="log", yscale="log", xlim=(1, T[-1]), xlabel="T")
        axes.set_ylabel(r"$\frac{1}{T}\sum_{t<T}\,\|\nabla\Phi(x^t)\|^2$")
        axes.legend(frameon=False, loc="upper right")
        _plain(axes)
        return _save(figure, folder, "theorem")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E6E8", linewidth=0.6)
    axes.set_axisbelow(True)


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    files = [folder / f"{name}.{kind}" for kind in KINDS]
    for file in files:
        figure.savefig(file, dpi=180, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files
