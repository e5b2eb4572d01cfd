"""The benchmark's table, in Markdown, and its figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pf2lora.data.figure import PALETTE
from pf2lora.reproduce.figures import STYLE, save
from pf2lora.reproduce.markdown import table
from pf2lora.reproduce.regret.records import Runs
from pf2lora.reproduce.regret.summary import POINTS, PointSummary, Regret
from pf2lora.reproduce.regret.tasks import TASKS
from pf2lora.reproduce.regret.variants import variants
from pf2lora.run.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARKEST = 10.0  # points from the best; what is further away is not darker
NOT_RUN = "–"
UNITS = {"accuracy": "accuracy", "matthews": "Matthews", "f1": "F1", "loss": "loss per token"}


def number(value: Estimate) -> str:
    """`3.4 ± 0.5`; one seed has no deviation."""
    text = f"{value.mean:.1f}"
    return text if value.deviation is None else f"{text} ± {value.deviation:.1f}"


def markdown(summaries: Mapping[str, PointSummary], runs: Runs) -> str:
    """Both points' tables, who is harmed by sharing, and how all of it was made."""
    parts = ["# Regret"]
    for point, summary in summaries.items():
        parts += [f"## {POINTS[point].capitalize()}", distances(summary)]
        if untold := [TASKS[task].title for task in summary.cells if not summary.learned(task)]:
            parts.append(
                f"(!) {'; '.join(untold)}: no variant is better, by more than its deviation, than the answer that "
                f"looks at no text (each client's most frequent label, or never an answer): distances there say who is "
                f"nearer to it, not who learned more."
            )
        if harmed := _harm(summary):
            parts.append(harmed)
    parts += ["## How", "\n".join(f"- {line}" for line in notes(runs))]
    return "\n\n".join(parts) + "\n"


def distances(summary: PointSummary) -> str:
    """A row per variant, a column for every task of the benchmark: how far it is from the best, or that it was not
    run. The variant that is never tuned is in bold."""
    head = ["", *(task.title for task in TASKS.values()), "regret", "mean"]
    rows = [["best score", *(_best(summary, task) for task in TASKS), "", ""]]
    if summary.trivial:
        rows.append(["without looking at the text", *(_trivial(summary, task) for task in TASKS), "", ""])
    for name, regret in by_regret(summary):
        cells = [_cell(summary, task, name) for task in TASKS]
        label = f"**{_label(summary, name)}**" if name in summary.untuned else _label(summary, name)
        rows.append([label, *cells, _largest(regret, len(summary.cells)), f"{regret.mean:.1f}"])
    return table(head, rows, numbers=True)


def _label(summary: PointSummary, name: str) -> str:
    """What is never tuned says the rates that it ran at: a default may change."""
    rates = summary.untuned.get(name, [])
    return variants()[name].label + (f" (lr {' and '.join(f'{r:g}' for r in rates)})" if rates else "")


def _best(summary: PointSummary, task: str) -> str:
    if task not in summary.cells:
        return NOT_RUN
    return f"{number(summary.cells[task][summary.best[task]].score)} ({UNITS[TASKS[task].metric]})"


def _trivial(summary: PointSummary, task: str) -> str:
    if task not in summary.trivial:
        return NOT_RUN
    return f"{summary.trivial[task]:.1f}{'' if summary.learned(task) else ' (!)'}"


def _cell(summary: PointSummary, task: str, name: str) -> str:
    if name not in summary.cells.get(task, {}):
        return "diverged" if (task, name) in summary.diverged else NOT_RUN
    cell = summary.cells[task][name]
    text = "**best**" if summary.best[task] == name else number(cell.distance)
    return f"{text} {cell.end}".rstrip()


def _largest(regret: Regret, tasks: int) -> str:
    """A regret over fewer tasks says so: it cannot be compared with the others'."""
    if regret.diverged:
        return "diverged"
    some = f" ({regret.tasks} of {tasks} tasks)" if regret.tasks < tasks else ""
    return f"{number(regret.largest)}{some}"


def by_regret(summary: PointSummary) -> list[tuple[str, Regret]]:
    """The smallest regret first; those that diverged or lack tasks after the others."""

    def place(item: tuple[str, Regret]) -> tuple[bool, int, float]:
        return item[1].diverged > 0, -item[1].tasks, item[1].largest.mean

    return sorted(summary.regret.items(), key=place)


def _harm(summary: PointSummary) -> str:
    """For the tasks on which clients disagree: what the client that loses most loses against training alone."""
    tasks = [task for task in summary.harm if TASKS[task].disagreement and summary.harm[task]]
    if not tasks:
        return ""
    rows = []
    for name, _ in by_regret(summary):
        found = [summary.harm[task].get(name) for task in tasks]
        rows.append([variants()[name].label, *(f"{h.points:+.1f} ({h.client})" if h else "" for h in found)])
    said = "Points that the client that loses most loses against Local (below 0: every client gains):"
    harms = table(["", *(TASKS[task].title for task in tasks)], rows, numbers=True)
    return f"{said}\n\n{harms}"


def notes(runs: Runs) -> list[str]:
    """What the numbers are, and what they were made with."""
    distances = (
        "distances to the best variant of the task, in points (100 × score; a loss: 0.01 nats per token, about 1% of "
        "perplexity), ± deviation over seeds of the difference to the best; regret: the largest, mean: over the tasks"
    )
    return [distances, *at_an_end(runs), *made_with(runs)]


def at_an_end(runs: Runs) -> list[str]:
    """What the arrows mean, where there are any."""
    tuned = [run for run in runs.values() if len(run.tries) > 1]
    ends = [run.end for run in tuned if run.end]
    if not ends:
        return []
    return [
        f"↑, ↓: the rates chosen are the largest or the smallest tried, so better ones may lie beyond: {len(ends)} of "
        f"{len(tuned)} tuned runs ({ends.count('↑')} ↑, {ends.count('↓')} ↓)"
    ]


def made_with(runs: Runs) -> list[str]:
    """Tasks, with what their runs have alike."""
    by_conditions: dict[str, list[str]] = {}
    for run in runs.values():
        conditions = ", ".join(f"{name} {value}" for name, value in run.conditions().items())
        tuning = (
            f", further tries outward: {run.outward} at most"
            if run.outward
            else ""
            if run.tries
            else ", never tuned"
        )
        titles = by_conditions.setdefault(f"{conditions}{tuning}; {run.machine['name']}", [])
        if TASKS[run.task].title not in titles:
            titles.append(TASKS[run.task].title)
    return [f"{'; '.join(titles)}: {conditions}" for conditions, titles in by_conditions.items()]


# --- the figure --------------------------------------------------------------------------------------------


def draw(summaries: Mapping[str, PointSummary], folder: Path) -> list[Path]:
    """A heat map for each point: variants by tasks, the darker the further from the best."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = max(len(summary.cells) for summary in summaries.values()) + 2
    rows = sum(len(summary.regret) + 3 for summary in summaries.values())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.4 + 0.95 * columns, 1.0 + 0.36 * rows), layout="constrained")
        grid = figure.subplots(len(summaries), 1, squeeze=False)
        for (axes,), (point, summary) in zip(grid, summaries.items()):
            _draw_point(axes, summary)
            apart = "; in bold and framed: never tuned, nothing set" if summary.untuned else ""
            axes.set_title(f"Distance to the best in points: {POINTS[point]}{apart}", loc="left", pad=10)
        return save(figure, folder, "regret")


def _draw_point(axes: Axes, summary: PointSummary) -> None:
    import numpy as np
    from matplotlib.patches import Rectangle

    tasks, ordered = list(summary.cells), by_regret(summary)
    values = np.full((len(ordered), len(tasks) + 2), np.nan)
    texts = {}
    for i, (name, regret) in enumerate(ordered):
        for j, task in enumerate(tasks):
            texts[i, j] = _cell(summary, task, name).replace("**", "")
            if name in summary.cells[task]:
                values[i, j] = summary.cells[task][name].distance.mean
        if not regret.diverged:
            values[i, len(tasks) :] = regret.largest.mean, regret.mean
        texts[i, len(tasks)] = _largest(regret, len(tasks)).split(" (")[0] + "*" * (regret.tasks < len(tasks))
        texts[i, len(tasks) + 1] = f"{regret.mean:.1f}"
    axes.imshow(values, cmap="YlOrBr", vmin=0, vmax=DARKEST, aspect="auto")
    for (i, j), text in texts.items():
        dark = values[i, j] > 0.7 * DARKEST
        axes.text(
            j,
            i,
            text.replace(" ± ", "\n± "),
            ha="center",
            va="center",
            fontsize=7,
            color="w" if dark else "k",
        )
    axes.axvline(len(tasks) - 0.5, color="k", linewidth=1.2)
    titles = [TASKS[task].title.replace(", ", ",\n", 1) for task in tasks]
    axes.set_xticks(
        range(len(tasks) + 2), [*titles, "regret\n(largest)", "mean"], fontsize=7, rotation=30, ha="right"
    )
    axes.set_yticks(range(len(ordered)), [_label(summary, name) for name, _ in ordered])
    for i, (name, _) in enumerate(ordered):  # what is never tuned stands apart
        if name in summary.untuned:
            axes.get_yticklabels()[i].set_fontweight("bold")
            frame: Any = {
                "fill": False,
                "edgecolor": PALETTE[0],
                "linewidth": 2.5,
                "clip_on": False,
                "zorder": 3,
            }
            axes.add_patch(Rectangle((-0.5, i - 0.5), len(tasks) + 2, 1, **frame))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
