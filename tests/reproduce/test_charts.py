"""What the figures show: lines with their spread, the paper's numbers, a legend of what is there."""

from __future__ import annotations

import math
from typing import Any

import pytest
from matplotlib.figure import Figure

from pf2lora.reproduce.charts import BARS, LINES, Shown, draw_panel, legend, write_title
from pf2lora.reproduce.tables import Quantity
from pf2lora.run.estimates import estimate

PERCENT = Quantity("accuracy, %", str, 100)


def plotted(line: Any) -> dict[float, float]:
    """What a line goes through, rounded."""
    return {x: round(y, 6) for x, y in line.get_xydata().tolist() if math.isfinite(y)}


def test_a_line_has_the_deviation_over_seeds_and_the_papers_dashed() -> None:
    axes: Any = Figure().subplots()
    line = {
        0.9: Shown("homlora", estimate([0.5, 0.6, 0.7]), estimate([0.9]), 0.8),
        0.3: Shown("homlora", estimate([0.4]), None, None),
        0.6: Shown("homlora", None, None, 0.7),
    }
    draw_panel(axes, {"homlora": line}, PERCENT, "SST-2", "h")
    served, before, paper = (of for of in axes.lines if of.get_marker() in "oD")
    assert plotted(served) == {0.3: 40, 0.9: 60}
    (spread,) = axes.collections
    (ends,) = (segment[:, 1].tolist() for segment in spread.get_segments() if segment.size)
    assert ends == pytest.approx([50, 70])
    assert plotted(before) == {0.9: 90} and before.get_linestyle() == "None"
    assert plotted(paper) == {0.6: 70, 0.9: 80}
    assert paper.is_dashed() and not served.is_dashed()


@pytest.mark.parametrize(
    ("shown", "labels"),
    [
        (Shown("homlora", estimate([0.5]), None, None), []),
        (Shown("homlora", estimate([0.5, 0.6]), None, 0.8), ["± deviation over seeds", "the paper"]),
        (Shown("homlora", None, estimate([0.5]), None), ["before averaging"]),
    ],
)
@pytest.mark.parametrize("kind", [BARS, LINES])
def test_the_legend_names_the_marks_that_are_there(shown: Shown, labels: list[str], kind: object) -> None:
    figure = Figure()
    legend(figure, ["homlora"], [shown], kind)
    assert [text.get_text() for text in figure.legends[0].texts] == ["HOMLoRA", *labels]


def test_a_long_title_takes_several_lines() -> None:
    narrow = Figure(figsize=(4, 3))
    write_title(narrow, "A title of many words " * 5)
    assert all(len(line) <= 44 for line in narrow.get_suptitle().split("\n"))
