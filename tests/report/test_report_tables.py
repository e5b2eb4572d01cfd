"""The report's tables and charts in a browser: saved as csv, reached by keyboard, against what no training gives."""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from result_example import HOSTILE, hostile, make_result, typed
from result_extras import with_classes, with_newcomers

from pf2lora.report import build

pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
TEXT = "[...document.querySelectorAll('{}')].map((node) => node.textContent.trim())"
CATCH = """window.saved = []; HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download); };
URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved.push(text)); return '#'; };"""


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return with_newcomers(with_classes(make_result(clients=4, seeds=2, rounds=20, layers=2)))


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Page]:
    with chromium.Page() as page:
        yield page


@pytest.fixture
def page(browser: chromium.Page, full: dict[str, Any], tmp_path: Path) -> Iterator[chromium.Page]:
    browser.errors.clear()
    browser.resize(1280, 900)
    browser.open(build(typed(full), tmp_path / "report.html"))
    assert browser.evaluate("document.documentElement.dataset.ready") == "true"
    yield browser
    assert browser.errors == []


def saved(page: chromium.Page, table: str) -> tuple[str, list[list[str]]]:
    page.evaluate(CATCH)
    page.evaluate(f"document.querySelector('{table} .csv').click()")
    name, text = page.evaluate("new Promise((done) => setTimeout(() => done(window.saved), 50))")
    return name, list(csv.reader(io.StringIO(text.removeprefix("\ufeff"))))


def test_every_table_can_be_saved(page: chromium.Page, full: dict[str, Any]) -> None:
    assert page.evaluate("[...document.querySelectorAll('main table')].every((t) => t.querySelector('.csv'))")
    name, rows = saved(page, "#headline")
    assert name.startswith("accuracy-in-mean-over-clients") and name.endswith(".csv")
    assert rows[0][:4] == ["Method", "Served", "Before averaging", "Deploy"]
    assert [row[0] for row in rows[1:]] == [
        *(method["label"] for method in full["methods"].values()),
        "untrained (round 0)",
        "majority label",
    ]
    assert len({len(row) for row in rows}) == 1


def test_headers_of_two_rows_and_pictures_are_words_in_a_csv(page: chromium.Page) -> None:
    _, costs = saved(page, "#costs")
    assert costs[0][:7] == [
        "Method",
        "Trainable parameters common",
        "Trainable parameters client’s own",
        "Trainable parameters head",
        "Sent per round adapter",
        "Sent per round with head",
        "FLOPs per round",
    ]
    _, clients = saved(page, "#clients")
    assert len(clients) == 5 and "PF2LoRA: " in clients[1][1] and "majority label: 6" in clients[1][1]


def test_a_table_that_is_drawn_later_can_be_saved_too(page: chromium.Page) -> None:
    page.evaluate("document.querySelector('#curves .as-table').open = true")
    wait = "new Promise((done) => setTimeout(() => done(!!document.querySelector('#curves .as-table .csv')), 80))"
    assert page.evaluate(wait)
    _, rows = saved(page, "#curves .as-table")
    assert rows[0][0] == "round" and rows[-1][0] == "majority label" and rows[-2][0] == "untrained (round 0)"


def test_no_cell_is_a_formula(browser: chromium.Page, full: dict[str, Any], tmp_path: Path) -> None:
    evil = copy.deepcopy(full)
    evil["clients"][0]["name"] = "=cmd|' /C calc'!A0"
    browser.open(build(typed(evil), tmp_path / "evil.html"))
    _, rows = saved(browser, "#summary")
    assert rows[1][0] == "'=cmd|' /C calc'!A0"
    assert saved(browser, "#clients")[1][1][2].lstrip("▲▼ ")[0] in "+-0123456789"


def test_every_scrolling_table_is_reached_by_keyboard(page: chromium.Page) -> None:
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((box) => box.querySelector('table'))"
        ".every((box) => box.tabIndex === 0 && box.getAttribute('aria-label'))"
    )


def test_a_table_says_that_it_goes_on_sideways(page: chromium.Page) -> None:
    more = "document.querySelector('#headline .scroll').hasAttribute('data-more')"
    assert page.evaluate(more) is False
    page.resize(390, 844)
    assert page.evaluate(f"new Promise((done) => setTimeout(() => done({more}), 100))") is True
    page.evaluate("document.querySelector('#headline .scroll').scrollLeft = 5000")
    assert page.evaluate(f"new Promise((done) => setTimeout(() => done({more}), 100))") is False


def test_long_names_end_in_an_ellipsis_and_are_whole_in_the_title(
    browser: chromium.Page, full: dict[str, Any], tmp_path: Path
) -> None:
    long = copy.deepcopy(full)
    long["clients"][0]["name"] = name = "a-client-with-a-name-that-is-much-too-long-for-any-table-of-a-report"
    browser.open(build(typed(long), tmp_path / "long.html"))
    for section in ("summary", "clients", "ranks", "deploy", "data"):
        found = browser.evaluate(
            f"(() => {{ const n = document.querySelector('#{section} .cut[title=\"{name}\"]');"
            "return [n.scrollWidth > n.clientWidth, n.textContent]; })()"
        )
        assert found == [True, name], section
    options = browser.evaluate(TEXT.format("#curves option"))
    assert "a-client-with-a-name-that-is-mu…" in options


def test_scores_are_seen_against_what_no_training_gives(page: chromium.Page) -> None:
    assert page.evaluate(TEXT.format("#headline .baselines th")) == ["untrained (round 0)", "majority label"]
    assert page.evaluate("document.querySelectorAll('#curves .plot .levels line').length") == 2
    for chart in ("#curves", "#tradeoff"):
        keys = page.evaluate(TEXT.format(f"{chart} .level-key .key"))
        assert keys[0].startswith("untrained (round 0) 5") and keys[1].startswith("majority label 6")


def test_right_labels_and_answers_of_each_client(page: chromium.Page, full: dict[str, Any]) -> None:
    counts = TEXT.format("#errors .confusion tbody td")
    assert page.evaluate(counts) == [str(4 * 40 + 6), "40", "20", "180"]
    page.evaluate("""(() => { const box = [...document.querySelectorAll('#errors select')].at(-1); box.value = '1';
        box.dispatchEvent(new Event('change')); })()""")
    assert page.evaluate(counts) == ["41", "10", "5", "45"]
    f1 = [2 * 41 / (51 + 46), 2 * 45 / (50 + 55)]
    cells = page.evaluate(TEXT.format("#errors table:not(.confusion) tbody td"))
    assert cells[0::4] == [f"{value * 100:.1f}" for value in f1] and cells[3::4] == ["51", "50"]


def test_wrong_rows_are_a_table(browser: chromium.Page, full: dict[str, Any], tmp_path: Path) -> None:
    examples = [
        {"client": name, "prompt": f"{HOSTILE} {name}", "references": ["negative"], "outputs": outputs}
        for name, outputs in (
            ("clinic-a", {"pf2lora": "positive (93%)"}),
            ("clinic-b", {"local": "positive (51%)"}),
        )
    ]
    browser.open(build(typed(full | {"examples": examples}), tmp_path / "wrong.html"))
    heads = browser.evaluate(TEXT.format("#examples thead th"))
    assert heads == ["Client", "Text", "Right label", "PF2LoRA", "Local"]
    cells = browser.evaluate(TEXT.format("#examples tbody td"))
    assert cells[:4] == [f"{HOSTILE} clinic-a", "negative", "positive (93%)", "–"]
    browser.evaluate("""(() => { const box = document.querySelector('#examples select'); box.value = 'clinic-b';
        box.dispatchEvent(new Event('change')); })()""")
    assert browser.evaluate(TEXT.format("#examples tbody th")) == ["clinic-b"]
    assert "--examples 3" not in browser.evaluate("document.querySelector('#errors').textContent")


def test_ranks_stand_beside_how_different_a_client_is(page: chromium.Page, full: dict[str, Any]) -> None:
    heads = page.evaluate(TEXT.format("#ranks th.mean"))
    assert heads == ["mean rank", "own part", "labels apart"]
    labels = [client["labels"] for client in full["clients"]]
    everybody = sum(own["negative"] for own in labels) / sum(sum(own.values()) for own in labels)
    apart = [abs(own["negative"] / sum(own.values()) - everybody) for own in labels]
    shown = page.evaluate(TEXT.format("#ranks tbody td.mean:last-child"))
    assert [float(text) for text in shown] == pytest.approx(apart, abs=0.006)


def test_names_of_labels_and_newcomers_run_nothing(browser: chromium.Page, tmp_path: Path) -> None:
    result = with_newcomers(with_classes(hostile()))
    result["labels"] = [HOSTILE, "b"]
    result["baselines"]["trivial"]["label"] = HOSTILE
    for newcomer in result["newcomers"]:
        newcomer["client"]["name"] = f"{HOSTILE} too"
    browser.errors.clear()
    browser.open(build(typed(result), tmp_path / "hostile.html"))
    assert browser.evaluate("window.hacked") is None and browser.errors == []
    assert browser.evaluate(TEXT.format("#newcomers tbody .cut"))[0] == f"{HOSTILE} too"


def test_it_prints_whole_tables(page: chromium.Page) -> None:
    page.resize(760, 1080)
    page.call("Emulation.setEmulatedMedia", media="print")
    wide = page.evaluate(
        "[...document.querySelectorAll('main table')].filter((t) => t.offsetWidth"
        " && t.getBoundingClientRect().right > innerWidth + 1).map((t) => t.caption.textContent)"
    )
    hidden = page.evaluate("[...document.querySelectorAll('.csv, nav')].some((n) => n.checkVisibility())")
    page.call("Emulation.setEmulatedMedia", media="")
    assert wide == [] and hidden is False
