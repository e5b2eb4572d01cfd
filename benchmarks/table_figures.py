"""The figures of docs/reproduction.md that are made of several calls' numbers: bars, or lines over what is varied, from
the files in `results/tables`.

python benchmarks/table_figures.py --out docs
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from stored_rows import preset_rows

from pf2lora.atomic import write_figure
from pf2lora.methods import METHODS
from pf2lora.reproduce.charts import (
    BARS,
    LINES,
    Shown,
    colour,
    draw_bar,
    draw_panel,
    legend,
    write_title,
)
from pf2lora.reproduce.figures import STYLE, plain
from pf2lora.reproduce.presets import load_preset
from pf2lora.reproduce.tables import Quantity

ORDER = list(METHODS)


class Panel(NamedTuple):
    """One axis: the files it is made of, what of them, and how many times that is shown. Over what is varied (`axis`)
    it has lines in the place of bars, and beside them the paper's, of the runs of a preset that are `of` this data set.
    A run's name ends with what is varied (`cola-0.3`), or it is `else_at`."""

    label: str
    files: tuple[str, ...]
    quantity: str
    times: float = 1
    axis: str = ""
    preset: str = ""
    of: str = ""
    else_at: float = math.nan

    def over(self, axis: str, preset: str = "", of: str = "", else_at: float = math.nan) -> Panel:
        return self._replace(axis=axis, preset=preset, of=of, else_at=else_at)


def on_sst2(*files: str) -> Panel:
    return Panel("SST-2, accuracy, %", files, "accuracy", 100)


def on_cola(*files: str) -> Panel:
    return Panel("CoLA, Matthews, %", files, "matthews", 100)


H, ALPHA, R = "heterogeneity h (the paper's s)", "α", "r"
FIGURES = {
    "ablations": (
        on_sst2("more-parameters-minilm", "bilevel-minilm"),
        on_cola("bilevel-cola-mpnet", "more-parameters-cola-two-level-mpnet"),
    ),
    "heterogeneity": (
        on_sst2("heterogeneity-sst2-minilm").over(H, "heterogeneity", "SST-2"),
        on_cola(*(f"heterogeneity-cola{which}-mpnet" for which in ("", "-0.9", "-1"))).over(
            H, "heterogeneity-cola", "CoLA"
        ),
    ),
    "alpha": (on_sst2("alpha-sst2-minilm").over(ALPHA),),
    "alpha-cola": (
        on_cola(*(f"alpha-cola-{which}-mpnet" for which in ("low", "0.001", "0.3", "high"))).over(ALPHA),
    ),
    "rank": (
        on_sst2("rank-sst2-minilm").over(R),
        on_cola("bilevel-cola-mpnet", *(f"rank-cola-{rank}-mpnet" for rank in (4, 6, 12, 16))).over(
            R, else_at=8
        ),
    ),
    "generation": (
        Panel("E2E, BLEU", ("e2e-smollm2",), "BLEU"),
        Panel("WebNLG, BLEU", ("webnlg-smollm2", "webnlg-pf2lora-smollm2", "webnlg-auto-smollm2"), "BLEU"),
    ),
}
TITLES = {
    "ablations": "More parameters, and with and without bilevel: the stand-ins, served",
    "heterogeneity": "Over heterogeneity, served: SST-2 with all-MiniLM-L6-v2, CoLA with all-mpnet-base-v2, "
    "PF2LoRA's α found by the clients; the paper with RoBERTa-base",
    "alpha": "SST-2 over α with all-MiniLM-L6-v2, served",
    "alpha-cola": "CoLA over α with all-mpnet-base-v2, served",
    "rank": "Over the common adapter's rank r, served: SST-2 with all-MiniLM-L6-v2, CoLA with all-mpnet-base-v2",
    "generation": "E2E and WebNLG with SmolLM2-135M, served",
}


def rows_of(name: str, quantity: str) -> Iterable[tuple[str, Shown]]:
    """A file's rows with their runs' labels."""
    for row in preset_rows(name):
        if row.quantity == quantity:
            served, before = (row.points[point] for point in ("served", "before_averaging"))
            yield row.label, Shown(row.method, served, before, row.paper)


def bars(panel: Panel) -> dict[str, list[Shown]]:
    """The bars of a panel by group; a method that several calls ran with the same settings is there once."""
    groups: dict[str, dict[str, Shown]] = {}
    for file in panel.files:
        for label, row in rows_of(file, panel.quantity):
            name = "auto" if "auto" in label else label.rpartition(", ")[2].casefold()
            groups.setdefault(name, {}).setdefault(row.method, row)
    return {name: sorted(of.values(), key=lambda r: ORDER.index(r.method)) for name, of in groups.items()}


def lines(panel: Panel) -> dict[str, dict[float, Shown]]:
    """The lines of a panel by method, of those that every file has."""
    found: dict[str, dict[float, Shown]] = {}
    for file in panel.files:
        rows = [(value_of(label, panel.else_at), row) for label, row in rows_of(file, panel.quantity)]
        for at, row in rows:
            found.setdefault(row.method, {}).setdefault(at, row._replace(paper=None))
    for file in panel.files:
        ran = {row.method for _, row in rows_of(file, panel.quantity)}
        found = {method: line for method, line in found.items() if method in ran}
    return dict(sorted(found.items(), key=lambda item: ORDER.index(item[0])))


def value_of(label: str, otherwise: float) -> float:
    """`0.3` of `CoLA, h = 0.3` and of `cola-0.3`."""
    number = re.search(r"(?:= |-)([\d.]+)$", label)
    return float(number[1]) if number else otherwise


def papers_lines(panel: Panel, methods: Collection[str]) -> dict[str, dict[float, Shown]]:
    """The paper's numbers over the same setting, of these methods."""
    found: dict[str, dict[float, Shown]] = {}
    for run in load_preset(panel.preset).runs if panel.preset else ():
        for method, value in run.paper[panel.quantity].items():
            if run.of == panel.of and run.at is not None and method in methods:
                found.setdefault(method, {})[run.at] = Shown(method, None, None, value)
    return found


def draw(name: str, folder: Path) -> list[Path]:
    panels = FIGURES[name]
    kind = LINES if panels[0].axis else BARS
    with mpl.rc_context(STYLE):
        figure = Figure(layout="constrained")
        shown = draw_lines(figure, panels) if kind is LINES else draw_bars(figure, panels)
        methods = list(dict.fromkeys(row.method for row in shown))
        legend(figure, methods, shown, kind)
        write_title(figure, TITLES[name])
        file = folder / f"{name}.svg"
        write_figure(file, figure, dpi=180)
    return [file]


def draw_lines(figure: Figure, panels: Sequence[Panel]) -> list[Shown]:
    figure.set_size_inches(1.5 + 3.6 * len(panels), 3.7)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    shown = []
    for axes, panel in zip(every, panels):
        ours = lines(panel)
        title, label = panel.label.split(", ", 1)
        quantity = Quantity(label, str, panel.times)
        for of in (papers_lines(panel, ours), ours):
            if of:
                draw_panel(axes, of, quantity, title, panel.axis)
                shown += [row for line in of.values() for row in line.values()]
    return shown


def draw_bars(figure: Figure, panels: Sequence[Panel]) -> list[Shown]:
    every = [bars(panel) for panel in panels]
    count = [sum(map(len, groups.values())) for groups in every]
    figure.set_size_inches(max(6.4, 2.2 + 0.55 * sum(count)), 3.2)
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=count)[0]
    for axes, panel, groups in zip(grid, panels, every):
        quantity, at, ticks = Quantity(panel.label, str, panel.times), 0.0, []
        for rows in groups.values():
            for i, row in enumerate(rows):
                draw_bar(axes, row, at + i, 1.0, quantity, colour(row.method))
            ticks.append(at + (len(rows) - 1) / 2)
            at += len(rows) + 0.6
        axes.set_xticks(ticks, list(groups) if len(groups) > 1 else [""])
        axes.set_ylabel(panel.label)
        plain(axes)
    return [row for groups in every for rows in groups.values() for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs"))
    out = parser.parse_args().out
    for name in FIGURES:
        for file in draw(name, out):
            print(file)


if __name__ == "__main__":
    main()
