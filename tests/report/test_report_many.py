"""A report of more methods than there are colours: headings, some hidden at first, scores against costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from result_example import make_result, typed, with_many_methods

from pf2lora.methods import BOUNDS, METHODS, SETS, group_of
from pf2lora.report import build, render, views

MANY = with_many_methods(make_result(rounds=4, layers=2, task="generation"))
PRESSED = "document.querySelectorAll('#curves .legend [aria-pressed=\"true\"]').length"
in_a_browser = pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium here (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    with chromium.Page() as page:
        page.resize(1280, 900)
        page.open(build(typed(MANY), tmp_path_factory.mktemp("many") / "report.html"))
        yield page
        page.evaluate("1")
        assert page.errors == []


def press(page: chromium.Page, text: str) -> None:
    page.evaluate(
        f"[...document.querySelectorAll('#curves .several')].find((b) => b.textContent === {text!r}).click()"
    )


def lines(page: chromium.Page) -> int:
    return int(page.evaluate("document.querySelectorAll('#curves figure:first-of-type .line').length / 2"))


def test_every_method_has_a_heading() -> None:
    assert {group_of(name) for name in METHODS.own} == {
        *("Each client has a part of its own", "One common adapter", "Bounds")
    }
    assert [name for name in METHODS.own if group_of(name) == "Bounds"] == list(BOUNDS)
    assert group_of("another:Package") == "Others"


def test_tables_have_headings_only_where_there_are_many_methods() -> None:
    few, many = (render([typed(r)]) for r in (make_result(rounds=2, layers=2), MANY))
    assert '<tr class="group">' not in few
    assert many.count('<tr class="group">') == 3 * 3  # of the headline, deploy and costs


def test_rows_stand_under_their_headings() -> None:
    rows: list[dict[str, Any]] = [{"series": s} for s in views.all_series([typed(MANY)], ["run"])]
    groups = dict(views.grouped(rows))
    assert sum(map(len, groups.values())) == len(METHODS.own)
    assert {r["series"].method for r in groups["Bounds"]} == set(BOUNDS)
    assert {r["series"].method for r in groups["One common adapter"]} == set(SETS["aggregation"])
    assert views.grouped(rows[:8]) == [("", rows[:8])]


@in_a_browser
def test_the_best_are_shown_first_and_the_rest_at_a_click(page: chromium.Page) -> None:
    press(page, "Best 6")
    assert page.evaluate(PRESSED) == 6 == lines(page)
    names = page.evaluate(
        "[...document.querySelectorAll('#curves .legend [aria-pressed=\"true\"]')].map((b) => b.textContent)"
    )
    assert {"PF2LoRA", "PF2LoRA (joint)", "HOMLoRA"} <= set(names)
    press(page, "All")
    assert page.evaluate(PRESSED) == len(METHODS.own) == lines(page)
    press(page, "Bounds")
    assert page.evaluate(PRESSED) == 2 == lines(page)
    outputs = "document.querySelectorAll('.example')[0].querySelectorAll('.column').length"
    assert page.evaluate(outputs) == 2  # what is hidden is hidden in the examples, too
    press(page, "None")
    assert page.evaluate(PRESSED) == 0 and "Nothing to draw" in page.evaluate(
        "document.querySelector('#curves figure').textContent"
    )


@in_a_browser
def test_scores_against_costs(page: chromium.Page) -> None:
    """Every method is a point with its name, better above; none of the names covers another."""
    points = page.evaluate(
        "[...document.querySelectorAll('#tradeoff figure')].map((f) => [...f.querySelectorAll('.point')].map((p) => "
        "[p.dataset.series, p.getBoundingClientRect().left, p.querySelector('path').getBoundingClientRect().top]))"
    )
    assert [len(figure) for figure in points] == [len(METHODS.own)] * 2
    tops = {name: top for name, _, top in points[0]}
    left = {name: x for name, x, _ in points[0]}
    assert tops["PF2LoRA"] < tops["HOMLoRA"] < tops["FedProx"]
    assert left["Local"] < left["HOMLoRA"]  # it sends nothing
    covered = page.evaluate(
        "[...document.querySelectorAll('#tradeoff figure')].map((f) => { const boxes = "
        "[...f.querySelectorAll('.name text')].map((t) => t.getBoundingClientRect()); let n = 0; "
        "boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => { if (a.left < b.right - 1 && b.left < a.right - 1 "
        "&& a.top + 2 < b.bottom - 2 && b.top + 2 < a.bottom - 2) n++; })); return n; })"
    )
    assert covered == [0, 0]


@in_a_browser
def test_a_lower_score_that_is_better_is_above(page: chromium.Page, tmp_path: Path) -> None:
    by_loss = MANY | {"metric": "loss"}
    page.open(build(typed(by_loss), tmp_path / "loss.html"))
    tops = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#tradeoff figure:first-of-type .point')].map((p) => "
        "[p.dataset.series, p.querySelector('path').getBoundingClientRect().top]))"
    )
    assert tops["HOMLoRA"] < tops["FedProx"]
