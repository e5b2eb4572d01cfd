"""What clients deploy, in a real browser: the ring at the best round, and each client's choice."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from result_example import make_result, typed, without_choices

from pf2lora.report import build

pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
TEXT = "[...document.querySelectorAll('{}')].map((node) => node.textContent.trim())"


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return make_result()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Any]:
    """Opens a result in the browser; afterwards, nothing may have been reported."""
    with chromium.Page() as page:

        def open_report(run: dict[str, Any]) -> chromium.Page:
            page.open(build(typed(run), tmp_path / "report.html"))
            assert page.evaluate("document.documentElement.dataset.ready") == "true"
            return page

        yield open_report
        assert page.errors == []


def test_the_round_with_the_lowest_validation_loss_has_a_ring(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    page.evaluate("document.querySelector('#curves input[value=validation]').click()")
    assert page.evaluate(TEXT.format("#curves figcaption"))[1] == "validation loss, served, mean over clients"
    rounds = [r for r in full["methods"]["pf2lora"]["runs"][0]["rounds"] if r["validation_loss"]]
    best = min(range(len(rounds)), key=lambda i: rounds[i]["validation_loss"][0])
    assert 0 < best < len(rounds) - 1
    across = page.evaluate("""[...document.querySelectorAll('#curves figure')].map((figure) => {
        const line = figure.querySelector('.line[data-series=PF2LoRA]');
        const at = line.querySelector('polyline').getAttribute('points').split(' ').map((p) => Number(p.split(',')[0]));
        const ring = Number(line.querySelector('.ring').getAttribute('cx'));
        return at.findIndex((x) => Math.abs(x - ring) < 0.1); })""")
    assert across == [best, best]
    assert (
        shown(without_choices(copy.deepcopy(full))).evaluate("document.querySelectorAll('.ring').length") == 0
    )


def test_every_client_has_its_choice_with_the_losses_it_chose_by(shown: Any, full: dict[str, Any]) -> None:
    page = shown(full)
    rows = "[...document.querySelectorAll('#deploy [data-view] tbody tr')].map((row) => row.innerText.split('\\t'))"
    words = {
        "served": "served",
        "before_averaging": "before averaging",
        "personal_steps": "after personal steps",
    }

    def expected(method: str, seed: int) -> list[list[str]]:
        return [
            [client["name"], words[c["candidate"]], f"{c['validation_loss']:.3f}"]
            + [f"{loss:.3f}" for loss in c["last_round"].values()]
            for client, c in zip(full["clients"], full["methods"][method]["runs"][seed]["choices"])
        ]

    assert [[cell.strip() for cell in row] for row in page.evaluate(rows)] == expected("pf2lora", 0)
    page.evaluate("""document.querySelectorAll('#deploy select').forEach((box, i) => { box.value = i ? '2' : '6';
        box.dispatchEvent(new Event('change')); })""")
    page.evaluate("""(() => { const box = document.querySelectorAll('#deploy select')[1]; box.value = '2';
        box.dispatchEvent(new Event('change')); })()""")
    assert [[cell.strip() for cell in row] for row in page.evaluate(rows)] == expected("local", 2)
