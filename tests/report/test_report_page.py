"""The report in a real browser: drawn, switched, read by keyboard, on a phone, with nothing fetched."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import chromium
import pytest
from result_example import HOSTILE, hostile, make_result, sparse, typed, without_choices
from result_extras import with_newcomers

from pf2lora.report import build
from pf2lora.run import numbers

pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium here (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return make_result(task="generation")


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Page]:
    with chromium.Page() as page:
        yield page


@pytest.fixture
def shown(browser: chromium.Page, tmp_path: Path) -> Iterator[Any]:
    """Opens results in the browser; afterwards, nothing may have been reported or fetched."""
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(1280, 900)
    opened = []

    def open_report(*runs: dict[str, Any]) -> chromium.Page:
        browser.open(build([typed(run) for run in runs], tmp_path / "report.html"))
        assert browser.evaluate("document.documentElement.dataset.ready") == "true"
        opened.append(runs)
        return browser

    yield open_report
    browser.evaluate("1")  # what is still on its way arrives before the answer
    assert browser.errors == []
    assert all(url.startswith("file:") for url in browser.requests) and len(browser.requests) <= len(opened)


TEXT = "[...document.querySelectorAll('{}')].map((node) => node.textContent.trim())"


def test_every_section_is_drawn(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    sections = page.evaluate("[...document.querySelectorAll('main > section')].map((node) => node.id)")
    assert sections == [
        *(
            "summary",
            "headline",
            "tradeoff",
            "curves",
            "deploy",
            "clients",
            "ranks",
            "shares",
            "examples",
            "costs",
            "warnings",
            "data",
            "config",
        )
    ]
    assert page.evaluate(
        "[...document.querySelectorAll('[data-view]')].every((node) => node.children.length > 1)"
    )
    assert page.evaluate("document.querySelectorAll('.plot svg .line').length") == 2 * 7 + 2 + 1
    assert page.evaluate("document.querySelectorAll('.heat td[data-tip]').length") == 8 * 12


def test_newcomers_have_a_table(shown: Any, full: dict[str, Any]) -> None:
    page = shown(with_newcomers(full))
    rows = page.evaluate(TEXT.format("#newcomers tbody th"))
    assert [" ".join(row.split()) for row in rows] == ["clinic-zPF2LoRA", "branch-officeHOMLoRA"]
    chosen = page.evaluate(TEXT.format("#newcomers td:nth-child(2)"))
    assert chosen[0].startswith("own adapter on the common one")
    assert "clearly below that of the common adapter alone, 0.430" in chosen[1]
    assert "± 10.85" in page.evaluate(TEXT.format("#newcomers td.number"))[0]


def test_a_score_taken_once_is_not_the_first_curve(shown: Any, full: dict[str, Any]) -> None:
    """Text is generated at the end alone: the curves begin with a score that has one."""
    once = copy.deepcopy(full)
    for method in once["methods"].values():
        for run in method["runs"]:
            for each in run["rounds"][:-1]:
                for point in ("served", "before_averaging"):
                    if each[point]:
                        each[point][once["metric"]] = [None] * len(once["clients"])
    other = shown(once).evaluate("document.querySelector('#curves [data-view] .pair select').value")
    assert other != once["metric"] and other in once["metrics"]


def test_a_method_alone_is_compared_with_itself_before_averaging(shown: Any, full: dict[str, Any]) -> None:
    alone = copy.deepcopy(full)
    alone["methods"] = {"pf2lora": alone["methods"]["pf2lora"]}
    for example in alone["examples"]:
        example["outputs"] = {"pf2lora": example["outputs"]["pf2lora"]}
    page = shown(alone)
    verdict = "document.querySelector('#clients .verdict').textContent"
    assert page.evaluate(verdict).startswith("PF2LoRA, deployed against PF2LoRA, served: 8 clients gain")
    page.evaluate("document.querySelector('#clients input[value=served]').click()")
    assert "served against PF2LoRA, before averaging" in page.evaluate(verdict)
    page = shown(without_choices(alone))
    assert "served against PF2LoRA, before averaging" in page.evaluate(verdict)
    assert page.evaluate("document.querySelectorAll('#deploy, #clients input').length") == 0
    assert page.evaluate("document.querySelectorAll('#clients select').length") == 1  # the score


def test_a_table_of_many_clients_scrolls_in_its_box(shown: Any, full: dict[str, Any]) -> None:
    many = copy.deepcopy(full)
    many["clients"] = [many["clients"][0] | {"name": f"c{k}"} for k in range(300)]
    many["examples"] = []

    def stretched(values: Any) -> Any:
        return values if values is None else (values * 300)[:300]

    for method in many["methods"].values():
        for run in method["runs"]:
            run["choices"] = stretched(run["choices"])
            for table in (run["served"], run["before_averaging"], run["deploy"]):
                for score in (table or {}).values():
                    if len(score["per_client"]) < 300:  # the candidates have the same tables
                        score["per_client"] = stretched(score["per_client"])
            for each in run["rounds"]:
                for key in ("train_loss", "validation_loss", "client_share", "second_order_share", "ranks"):
                    each[key] = stretched(each[key])
                for point in ("served", "before_averaging"):
                    each[point] = each[point] and {m: stretched(v) for m, v in each[point].items()}
    page = shown(many)
    heights = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map((box) => box.getBoundingClientRect().height)"
    )
    assert max(heights) <= 46 * 16 + 2 and page.evaluate("document.documentElement.scrollHeight") < 10300


def test_the_page_computes_what_the_tables_say(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    page.evaluate("document.querySelectorAll('.as-table').forEach((node) => { node.open = true; })")
    last = page.evaluate(
        "new Promise((done) => setTimeout(() => done("
        + TEXT.format("#curves .as-table tr:last-child td")
        + "), 50))"
    )
    result = typed(full)
    info = result.metrics["accuracy"]
    for shown_value, method in zip(last, full["methods"]):
        e = result.estimate(method, "served", "accuracy")
        assert e is not None and e.deviation is not None
        assert shown_value == f"{numbers.score(e.mean, info)} ± {numbers.score(e.deviation, info)}"
    own = result.client_estimates("pf2lora", "deploy", "accuracy")
    alone = result.client_estimates("local", "deploy", "accuracy")
    gains = sorted((a.mean - b.mean for a, b in zip(own, alone) if a and b), reverse=True)
    drawn = page.evaluate(TEXT.format("#clients .dots tbody td.number"))
    assert [re.sub(r"[▲▼ ]|may.*", "", text) for text in drawn] == [
        numbers.score(g, info, True) for g in gains
    ]


def test_methods_can_be_switched_off_and_on(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    lines = "document.querySelectorAll('#curves .plot .line').length"
    button = "document.querySelector('#curves .legend button')"
    assert page.evaluate(lines) == 14
    page.evaluate(f"{button}.click()")
    assert page.evaluate(lines) == 12
    assert page.evaluate(f"{button}.getAttribute('aria-pressed')") == "false"
    page.evaluate(f"{button}.click()")
    assert page.evaluate(lines) == 14


def test_curves_follow_their_controls(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    page.evaluate("document.querySelector('#curves input[value=before_averaging]').click()")
    assert page.evaluate("document.querySelector('#curves figure').querySelectorAll('.line').length") == 5
    page.evaluate("""(() => { const box = document.querySelector('#curves select'); box.value = '0';
        box.dispatchEvent(new Event('change')); })()""")
    captions = page.evaluate(TEXT.format("#curves figcaption"))
    assert captions == ["accuracy (%), before averaging, clinic-a", "training loss, clinic-a"]


def test_charts_are_read_by_keyboard_and_by_pointer(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    page.evaluate("document.querySelector('#curves .as-table summary').focus()")
    page.evaluate("document.querySelector('#curves .plot svg').focus()")
    page.press("End")
    page.press("ArrowLeft")
    spoken = page.evaluate("document.querySelector('#curves .quiet').textContent")
    assert spoken.startswith("Round 18: ") and "PF2LoRA" in spoken
    assert page.evaluate("document.getElementById('tip').hidden") is False
    box = page.evaluate("""(() => { const b = document.querySelector('#curves .plot').getBoundingClientRect();
        return [b.x, b.y, b.width, b.height]; })()""")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] - 15, y=box[1] + box[3] / 2)
    assert page.evaluate("document.getElementById('tip').textContent").startswith("round 20")


def test_the_slider_moves_through_the_learned_ranks(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    rounds = [entry for entry in full["methods"]["pf2lora"]["runs"][0]["rounds"] if entry["ranks"]]

    def cells() -> list[int]:
        return [int(text) for text in page.evaluate(TEXT.format(".heat td[data-tip]"))]

    assert cells() == [*chain(*rounds[-1]["ranks"])]
    page.evaluate("document.querySelector('.slider input').focus()")
    page.press("ArrowLeft")
    assert cells() == [*chain(*rounds[-2]["ranks"])]
    assert (
        page.evaluate("document.querySelector('.slider output').textContent")
        == f"round {rounds[-2]['round']}"
    )
    page.evaluate("document.querySelector('.heat td[tabindex=\"0\"]').focus()")
    page.press("ArrowDown")
    page.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.tip").startswith(
        "clinic-b\nencoder.layer.0.attention.self.value"
    )


def test_examples_mark_the_words_that_differ(shown: Any) -> None:
    result = make_result(clients=2, seeds=1, rounds=2, layers=2, task="generation")
    result["examples"] = [
        {
            "client": "clinic-a",
            "prompt": "p",
            "references": ["r"],
            "outputs": {"homlora": "a cheap pub", "pf2lora": "a very cheap bar"},
        },
        {
            "client": "clinic-b",
            "prompt": "q",
            "references": [],
            "outputs": {"homlora": "", "pf2lora": "same"},
        },
    ]
    page = shown(result)
    assert page.evaluate(TEXT.format(".example:first-child ins")) == ["very", "bar"]
    assert page.evaluate(TEXT.format(".example:first-child del")) == ["pub"]
    page.evaluate("""(() => { const box = document.querySelector('#examples select'); box.value = 'clinic-b';
        box.dispatchEvent(new Event('change')); })()""")
    assert page.evaluate(TEXT.format(".example h3")) == ["clinic-b"]


def test_hostile_texts_run_nothing(shown: Any) -> None:
    page = shown(hostile())
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelector('#data tbody th').textContent") == HOSTILE
    assert any(text.startswith(HOSTILE) for text in page.evaluate(TEXT.format("#clients tbody th")))


@pytest.mark.parametrize("width", [375, 768, 1280])
def test_the_page_never_scrolls_sideways(shown: Any, full: dict[str, Any], width: int) -> None:
    long = copy.deepcopy(full)
    long["clients"][0]["name"] = "a-very-long-client-name-without-any-space-in-it-whatsoever-1234567890"
    page = shown(long)
    page.resize(width, 800)
    page.evaluate("document.querySelectorAll('.as-table').forEach((node) => { node.open = true; })")
    wait = "new Promise((done) => setTimeout(() => done(document.documentElement.scrollWidth), 100))"
    assert page.evaluate(wait) == width


def test_the_theme_button_switches(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(background) != light
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(background) == light


def test_controls_have_names(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    unnamed = page.evaluate("""
        [...document.querySelectorAll('select, input, button, svg[tabindex], [role=region], [role=img]')]
        .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim()
          || node.labels?.[0]?.textContent.trim())).length""")
    assert unnamed == 0
    assert page.evaluate(
        "[...document.querySelectorAll('table')].every((node) => node.caption && node.querySelector('th[scope]'))"
    )
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))


def test_a_result_with_every_null_is_drawn(shown: Any) -> None:
    page = shown(sparse())
    assert page.evaluate("document.querySelectorAll('#ranks, #shares, #examples').length") == 0
    assert "Nothing to draw" in page.evaluate("document.querySelector('#curves').textContent")


def test_several_runs_lie_over_each_other(shown: Any, full: dict[str, Any]) -> None:
    other = copy.deepcopy(full)
    other["config"]["rounds"] = 99
    page = shown(full, other)
    assert (
        page.evaluate("document.querySelectorAll('#curves figure')[0].querySelectorAll('.line').length") == 14
    )
    dashes = page.evaluate(
        "[...document.querySelectorAll('#curves .line polyline')].map((n) => n.getAttribute('stroke-dasharray'))"
    )
    assert len(set(dashes)) == 2
    assert page.evaluate(TEXT.format("#differences td")) == ["20", "99"]


def test_without_script_the_table_is_shown_and_no_dead_control(full: dict[str, Any], tmp_path: Path) -> None:
    with chromium.Page(script=False) as page:
        page.open(build(typed(full), tmp_path / "report.html"))
        visible = page.evaluate("document.body.innerText")
        controls = page.evaluate(
            "[...document.querySelectorAll('button, input')].filter((n) => n.checkVisibility()).length"
        )
    assert "The charts need JavaScript" in visible and "What to look at" in visible
    assert "PF2LoRA (joint)" in visible and "tied" in visible
    assert controls == 0
