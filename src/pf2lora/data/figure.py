"""A picture of what each client got: its label shares in train and test, and its size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pf2lora.atomic import check_writable, make_folder, write_figure
from pf2lora.data.summary import Summary
from pf2lora.errors import UserError, check_path, reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".svg", ".png", ".pdf")
# Okabe and Ito's colours, told apart by colour-blind readers too; the neighbours differ in lightness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK = "#222222"
CROWD = 40  # with more clients than this the rows are thinner, and without numbers


def check_figure_file(file: Path, force: bool = False) -> None:
    """Find out before the work whether the picture can be written."""
    if file.suffix.lower() not in KINDS:
        raise UserError(
            f"{file}: a figure is written as {', '.join(KINDS)}, not {file.suffix or 'no suffix'!r}"
        )
    with reading(check_path(file)):
        if file.is_dir() or (file.exists() and not force):
            raise UserError(f"{file} exists already: name another file, or overwrite it with --force")
    check_writable(file)


def draw(summary: Summary, file: Path, title: str) -> None:
    """Stacked bars of label shares, one row per client (thick: train, thin: test), with sizes beside them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = summary.with_most(len(PALETTE))
    rows = len(shown.clients)
    height = 1.7 + rows * (0.42 if rows <= CROWD else 0.16)
    with mpl.rc_context(
        {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "pf2lora", "text.color": INK}
    ):
        figure = Figure(figsize=(8.6, height), layout="constrained")
        shares, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _draw_shares(shares, shown)
        _draw_sizes(sizes, shown)
        shares.set_yticks(range(rows), [_short(name) for name in shown.clients])
        if rows > CROWD:
            shares.tick_params(axis="y", labelsize=6)
        shares.set_ylim(rows - 0.4, -0.6)  # the first client on top
        figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", fontweight="bold")
        handles, labels = shares.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False)
        make_folder(file.parent)
        write_figure(file, figure, dpi=160)


def _draw_shares(axes: Axes, summary: Summary) -> None:
    y = np.arange(len(summary.clients))
    parts = ((summary.train_shares, -0.08, 0.46, True), (summary.test_shares, 0.27, 0.16, False))
    for shares, offset, thickness, labelled in parts:
        left = np.zeros(len(y))
        for i, label in enumerate(summary.labels):
            width = 100 * shares[:, i]
            axes.barh(
                y + offset,
                width,
                thickness,
                left=left,
                color=PALETTE[i],
                edgecolor="white",
                linewidth=0.4,
                label=_short(label) if labelled else None,
            )
            left += width
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of labels, % (thick: train, thin: test)")
    _plain(axes)


def _draw_sizes(axes: Axes, summary: Summary) -> None:
    y = np.arange(len(summary.clients))
    train, test = summary.train.sum(axis=1), summary.test.sum(axis=1)
    axes.barh(y - 0.08, train, 0.46, color="#5B6770")
    axes.barh(y + 0.27, test, 0.16, color="#A9B2B9")
    numbered = len(y) <= CROWD
    for i in range(len(y)) if numbered else ():
        label = f" {train[i]:,} + {test[i]:,}"
        axes.text(max(train[i], test[i]), i, label, va="center", fontsize=8, color=INK)
    axes.set_xlim(0, (1.45 if numbered else 1.05) * max(train.max(), test.max()))  # room for the numbers
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("rows (train + test)")
    axes.locator_params(axis="x", nbins=4)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _short(name: str) -> str:
    """A name that fits, without the `$` and leading `_` that matplotlib takes for its own."""
    name = name if len(name) <= 24 else name[:23] + "…"
    return name.replace("$", r"\$").removeprefix("_")
