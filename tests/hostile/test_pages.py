"""Markup in names and texts runs nothing in any page or picture that we make (the report's own test is beside it)."""

from __future__ import annotations

from pathlib import Path

import chromium
import numpy as np
import pytest
from result_example import HOSTILE, hostile, typed

from pf2lora.data.figure import draw
from pf2lora.data.summary import Summary
from pf2lora.report import build
from pf2lora.reproduce.page import markdown
from pf2lora.reproduce.preset import Example, Preset, Run
from pf2lora.reproduce.tables import Finding
from pf2lora.run.config import Config

in_a_browser = pytest.mark.skipif(chromium.find() is None, reason="no Chromium here")
counts = np.array([[3, 4], [5, 1]])


def figure(folder: Path) -> Path:
    """A picture whose title, clients and labels are markup."""
    summary = Summary(
        [HOSTILE, "</text><script>hacked = 1</script>"],
        ["<script>hacked = 1</script>", "$x$"],
        counts,
        counts,
    )
    draw(summary, folder / "a.svg", f"by column {HOSTILE} $\\frac{{")
    return folder / "a.svg"


@in_a_browser
def test_a_picture_runs_nothing(tmp_path: Path) -> None:
    file = figure(tmp_path)
    page_file = tmp_path / "page.html"
    page_file.write_text(
        file.read_text(encoding="utf8"), encoding="utf8"
    )  # as part of a page it would run, too
    for shown in (file, page_file):
        with chromium.Page() as page:
            page.open(shown)
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("document.querySelectorAll('script').length") == 0
            assert "<script>" in page.evaluate("document.documentElement.textContent")


@in_a_browser
def test_a_comparison_of_runs_runs_nothing(tmp_path: Path) -> None:
    result = typed(hostile())
    with chromium.Page() as page:
        page.open(build([result, result], tmp_path / "report.html", [HOSTILE, HOSTILE]))
        assert page.evaluate("window.hacked") is None


def test_a_reproductions_page_holds_no_markup() -> None:
    config = Config()
    run = Run("a", label=HOSTILE, config=config, paper={"accuracy": {"local": 0.5}}, show=(), of="a")
    examples = (Example("", HOSTILE, {"local": HOSTILE}),)
    preset = Preset("a", HOSTILE, HOSTILE, (), (run,), (HOSTILE,), False, "none", "", None, examples)
    text = markdown(preset, preset, [Finding(run, typed(hostile()))], ["a.svg"])
    assert "<" not in text and "script" in text
