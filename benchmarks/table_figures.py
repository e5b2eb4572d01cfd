"""The figures of docs/reproduction.md that are made of several calls' numbers: bars from the files in `results/tables`.

python benchmarks/table_figures.py --out docs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from pf2lora.atomic import write_figure
from pf2lora.methods import METHODS
from pf2lora.reproduce.charts import Bar, colour, draw_bar, legend
from pf2lora.reproduce.figures import STYLE, plain
from pf2lora.reproduce.tables import Quantity
from pf2lora.run.estimates import Estimate, estimate

POINTS = ("served", "before_averaging")
TABLES = Path(__file__).parent / "results" / "tables"


class Panel(NamedTuple):
    """One axis: the files it is made of, what of them, and how many times that is shown."""

    label: str
    files: tuple[str, ...]
    quantity: str
    times: float = 1


FIGURES = {
    "ablations": (
        Panel("SST-2, accuracy, %", ("more-parameters-minilm", "bilevel-minilm"), "accuracy", 100),
        Panel(
            "CoLA, Matthews, %",
            ("bilevel-cola-mpnet", "more-parameters-cola-two-level-mpnet"),
            "matthews",
            100,
        ),
    ),
    "alpha-cola": (
        Panel(
            "CoLA, Matthews, %",
            tuple(f"alpha-cola-{which}-mpnet" for which in ("low", "0.001", "0.3", "high")),
            "matthews",
            100,
        ),
    ),
    "rank": (Panel("SST-2, accuracy, %", ("rank-sst2-minilm",), "accuracy", 100),),
    "generation": (
        Panel("E2E, BLEU", ("e2e-smollm2",), "BLEU"),
        Panel("WebNLG, BLEU", ("webnlg-smollm2", "webnlg-pf2lora-smollm2", "webnlg-auto-smollm2"), "BLEU"),
    ),
}
TITLES = {
    "ablations": "More parameters, and with and without bilevel: the stand-ins, served",
    "alpha-cola": "Sensitivity to α with all-mpnet-base-v2, served",
    "rank": "Sensitivity to r, served",
    "generation": "E2E and WebNLG with SmolLM2-135M, served",
}


def rows_of(name: str, quantity: str) -> Iterable[tuple[str, Bar]]:
    """A file's bars with their groups' labels: a page's rows, or the seeds of a run that was cut off before it."""
    content: dict[str, Any] = json.loads((TABLES / f"{name}.json").read_text(encoding="utf8"))
    if "rows" not in content:
        for run in content["runs"]:
            served, before = (estimate(run["per_seed"][p][quantity]) for p in POINTS)
            yield run["run"], Bar(run["method"], served, before, None)
        return
    labels = {run["name"]: run["label"] for run in content["runs"]}
    for row in content["rows"]:
        if row["quantity"] == quantity:
            served, before = (None if row[p] is None else Estimate(**row[p]) for p in POINTS)
            yield labels[row["run"]], Bar(row["method"], served, before, row["paper"])


def bars(panel: Panel) -> dict[str, list[Bar]]:
    """The bars of a panel by group; a method that several calls ran with the same settings is there once."""
    groups: dict[str, dict[str, Bar]] = {}
    for file in panel.files:
        for label, row in rows_of(file, panel.quantity):
            name = "auto" if "auto" in label else label.rpartition(", ")[2].casefold()
            groups.setdefault(name, {}).setdefault(row.method, row)
    order = list(METHODS)
    found = {name: sorted(of.values(), key=lambda r: order.index(r.method)) for name, of in groups.items()}
    if all("=" in name for name in found):  # values of a number, whichever call ran them first
        return dict(sorted(found.items(), key=lambda group: float(group[0].partition("=")[2])))
    return found


def draw(name: str, folder: Path) -> list[Path]:
    panels = [(panel, bars(panel)) for panel in FIGURES[name]]
    methods = list(
        dict.fromkeys(row.method for _, groups in panels for rows in groups.values() for row in rows)
    )
    with mpl.rc_context(STYLE):
        count = [sum(map(len, groups.values())) for _, groups in panels]
        figure = Figure(figsize=(max(6.4, 2.2 + 0.55 * sum(count)), 3.2), layout="constrained")
        every = figure.subplots(1, len(panels), squeeze=False, width_ratios=count)[0]
        for axes, (panel, groups) in zip(every, panels):
            quantity, at, ticks = Quantity(panel.label, str, panel.times), 0.0, []
            for rows in groups.values():
                for i, row in enumerate(rows):
                    draw_bar(axes, row, at + i, 1.0, quantity, colour(row.method))
                ticks.append(at + (len(rows) - 1) / 2)
                at += len(rows) + 0.6
            axes.set_xticks(ticks, list(groups) if len(groups) > 1 else [""])
            axes.set_ylabel(panel.label)
            plain(axes)
        paper = any(row.paper is not None for _, groups in panels for rows in groups.values() for row in rows)
        legend(figure, methods, "bars at two points" if paper else "two points", columns=3)
        figure.suptitle(TITLES[name], x=0.01, ha="left", fontweight="bold")
        file = folder / f"{name}.svg"
        write_figure(file, figure, dpi=180)
    return [file]


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
