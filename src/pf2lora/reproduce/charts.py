"""The figures of presets: bars with the paper's numbers as marks, lines over a varied setting, training losses."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pf2lora.data.figure import INK, PALETTE
from pf2lora.methods import METHODS, SETS
from pf2lora.reproduce import tables
from pf2lora.reproduce.figures import DASHED, STYLE, plain, save
from pf2lora.reproduce.preset import Preset
from pf2lora.reproduce.tables import Finding, Quantity, Row
from pf2lora.run.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_AXIS = {"accuracy", "matthews"}  # metrics of one scale: a table's data sets side by side


def draw(preset: Preset, findings: Sequence[Finding], folder: Path, title: str) -> list[Path]:
    """The preset's figure as SVG and PNG; none where it has none."""
    if preset.figure == "none":
        return []
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(layout="constrained")
        FIGURES[preset.figure](figure, preset, findings)
        write_title(figure, title)
        return save(figure, folder, preset.name)


def write_title(figure: Figure, title: str) -> None:
    """Above a figure, in as many lines as its width needs."""
    letters = int(11 * figure.get_figwidth())
    figure.suptitle(
        textwrap.fill(title, letters, break_on_hyphens=False), x=0.01, ha="left", fontweight="bold"
    )


def methods_of(findings: Sequence[Finding]) -> list[str]:
    """The methods in the order in which runs name them."""
    names = (METHODS[name].name for f in findings for name in f.run.config.training.method)
    return list(dict.fromkeys(names))


def colour(method: str) -> str:
    """A method has the same colour in every figure, the paper's each their own; another package's is grey."""
    own = list(dict.fromkeys([*SETS["paper"], *METHODS.own]))
    return PALETTE[own.index(method) % len(PALETTE)] if method in own else PALETTE[-1]


def panels(findings: Sequence[Finding]) -> dict[str, tuple[Quantity, list[tuple[Finding, list[Row]]]]]:
    """The rows by quantity; metrics of one scale share a panel."""
    found: dict[str, tuple[Quantity, list[tuple[Finding, list[Row]]]]] = {}
    for finding in findings:
        by_quantity: dict[str, list[Row]] = {}
        for row in tables.rows(finding):
            by_quantity.setdefault(row.quantity, []).append(row)
        for name, rows in by_quantity.items():
            key = "score" if name in ONE_AXIS else name
            quantity = tables.quantity_of(name, finding)
            if key in found and found[key][0].label != quantity.label:
                quantity = Quantity("score (CoLA: Matthews), %", quantity.write, quantity.times)
            found[key] = (quantity, [*(found[key][1] if key in found else []), (finding, rows)])
    return found


def draw_bars(figure: Figure, preset: Preset, findings: Sequence[Finding]) -> None:
    """A group for each run, a bar for each method (served), a circle before averaging, a mark for the paper's."""
    names, groups = methods_of(findings), panels(findings)
    figure.set_size_inches(max(6.5, 1.6 + 0.28 * len(names) * len(findings)), 0.9 + 2.6 * len(groups))
    every = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, (quantity, group) in zip(every, groups.values()):
        width = 0.8 / len(names)
        for at, (_, rows) in enumerate(group):
            for row in rows:
                x = at + (names.index(row.method) - (len(names) - 1) / 2) * width
                draw_bar(axes, row, x, width, quantity, colour(row.method))
        axes.set_xticks(range(len(group)), [finding.run.label for finding, _ in group])
        axes.set_ylabel(quantity.label)
        plain(axes)
    legend(figure, names, [row for _, group in groups.values() for _, rows in group for row in rows])


class Shown(NamedTuple):
    """What a figure shows of a method: served, with a circle before averaging and a mark for the paper's."""

    method: str
    served: Estimate | None
    before: Estimate | None
    paper: float | None


def draw_bar(axes: Any, row: Row | Shown, x: float, width: float, quantity: Quantity, shade: str) -> None:
    """One method's bar and marks."""
    if row.served is not None:
        value, deviation = row.served.mean * quantity.times, row.served.deviation
        error = None if deviation is None else deviation * quantity.times
        axes.bar(x, value, 0.92 * width, color=shade, yerr=error, error_kw={"elinewidth": 0.8, "ecolor": INK})
    if row.before is not None:
        value = row.before.mean * quantity.times
        axes.plot([x], [value], **CIRCLE, color="white", markeredgecolor=INK)
    if row.paper is not None:
        value = row.paper * quantity.times
        axes.plot([x - 0.46 * width, x + 0.46 * width], [value, value], color=INK, linewidth=1.6)


def draw_lines(figure: Figure, preset: Preset, findings: Sequence[Finding]) -> None:
    """A panel for each data set: scores over the varied setting, as `draw_line` has them."""
    names = methods_of(findings)
    series = list(dict.fromkeys(finding.run.of for finding in findings))
    figure.set_size_inches(1.5 + 3.4 * len(series), 3.4)
    every = figure.subplots(1, len(series), squeeze=False)[0]
    shown = []
    for axes, of in zip(every, series):
        found = [(f, row) for f in findings if f.run.of == of for row in tables.rows(f)]
        quantity = tables.quantity_of(found[0][1].quantity, found[0][0])
        lines = {
            name: {
                f.run.at or 0.0: row
                for f, row in found
                if row.method == name and row.quantity == found[0][1].quantity
            }
            for name in names
        }
        draw_panel(axes, lines, quantity, of, preset.axis)
        shown += [row for line in lines.values() for row in line.values()]
    legend(figure, names, shown, LINES)


Lines = Mapping[str, Mapping[float, Row | Shown]]  # by method and by what is varied


def draw_panel(axes: Any, lines: Lines, quantity: Quantity, title: str, axis: str) -> None:
    """One data set's lines; what is varied over more than a decade or so is on a log axis."""
    values = [at for line in lines.values() for at in line]
    for name, line in lines.items():
        draw_line(axes, dict(sorted(line.items())), quantity, colour(name))
    spread = min(values) > 0 and max(values) / min(values) > 20
    axes.set_title(title, loc="left")
    axes.set(xlabel=axis, ylabel=quantity.label, xscale="log" if spread else "linear")
    plain(axes)


def draw_line(axes: Any, line: Mapping[float, Row | Shown], quantity: Quantity, shade: str) -> None:
    """One method: served with its deviation over seeds, circles before averaging, the paper's dashed."""

    def plotted(values: Iterable[float | None]) -> list[float]:
        return [math.nan if value is None else value * quantity.times for value in values]

    served = [row.served or Estimate(math.nan, None, 0) for row in line.values()]
    means, deviations = plotted(e.mean for e in served), plotted(e.deviation for e in served)
    before = plotted(row.before.mean if row.before else None for row in line.values())
    theirs = {at: row.paper for at, row in line.items() if row.paper is not None}
    axes.errorbar(list(line), means, deviations, **LINES, color=shade, elinewidth=1, capsize=2.5)
    axes.plot(list(line), before, **CIRCLE, color="white", markeredgecolor=shade, zorder=4)
    axes.plot(list(theirs), plotted(theirs.values()), **PAPERS, color=shade)


def draw_losses(figure: Figure, preset: Preset, findings: Sequence[Finding]) -> None:
    """The clients' mean training loss and its exponential by round, a thin line for each seed."""
    names = methods_of(findings)
    figure.set_size_inches(9.6, 0.9 + 2.9 * len(findings))
    grid = figure.subplots(len(findings), 2, squeeze=False)
    for pair, finding in zip(grid, findings):
        assert finding.result is not None
        for name in names:
            if name not in finding.result.methods:
                continue
            for run in finding.result.methods[name].runs:
                losses = np.array([math.nan if v is None else v for v in tables.mean_losses(run)])
                rounds = [record.round for record in run.rounds]
                for axes, values in zip(pair, (losses, np.exp(losses))):
                    axes.plot(rounds, values, color=colour(name), linewidth=1.2)
        for axes, label in zip(pair, ("training loss", "training perplexity")):
            axes.set(xlabel="round", ylabel=f"{finding.run.label}: {label}", yscale="log")
            plain(axes)
    legend(figure, names, [])


CIRCLE: Any = {"marker": "o", "markersize": 4, "linestyle": ""}
BARS: Any = {"linewidth": 1.6}
LINES: Any = {"marker": "o", "markersize": 4, "linewidth": 1.5}
PAPERS: Any = {"marker": "D", "markersize": 3, "linewidth": 1, "linestyle": DASHED}


def legend(figure: Figure, names: Sequence[str], shown: Sequence[Row | Shown], kind: Any = BARS) -> None:
    """Below a figure of a `kind`: its methods, and whichever marks are among what is shown."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = {name: METHODS[name].label if name in METHODS else name for name in names}
    handles: list[Any] = [Patch(color=colour(name), label=label) for name, label in labels.items()]
    if any(row.served and row.served.deviation is not None for row in shown):
        bar: Any = {"marker": "|", "markersize": 9, "linestyle": ""}
        handles.append(Line2D([], [], color=INK, **bar, label="± deviation over seeds"))
    if any(row.before for row in shown):
        handles.append(Line2D([], [], color="white", markeredgecolor=INK, **CIRCLE, label="before averaging"))
    if any(row.paper is not None for row in shown):
        style = PAPERS if kind is LINES else BARS
        handles.append(Line2D([], [], color=INK, **style, label="the paper"))
    columns = int(figure.get_figwidth() / 1.9)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, handlelength=2.6)


FIGURES: dict[str, Callable[[Figure, Preset, Sequence[Finding]], None]] = {
    "bars": draw_bars,
    "lines": draw_lines,
    "losses": draw_losses,
}
