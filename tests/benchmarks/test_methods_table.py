"""The tables of docs/ that scripts write are those of the recorded runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from pf2lora.methods import METHODS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_has_the_table_of_the_recorded_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "methods_table", raising=False)
    script = importlib.import_module("methods_table")
    page = script.PAGE.read_text(encoding="utf8")
    assert page == script.page_with_table(page), "python benchmarks/methods_table.py"
    _, _, table = page.partition(script.BEGIN)
    assert table.count("\n| ") > 6 and "| regret | mean |" in table
    for name in METHODS.own:
        assert f"`{name}`" in page  # what it does, costs and is good for


def test_what_decides_an_outcome_is_that_of_the_recorded_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("outcome_tables")
    page = script.PAGE.read_text(encoding="utf8")
    assert page == script.page_with_tables(page), "python benchmarks/outcome_tables.py"
    lines = {line.split(" | ")[0]: line for line in script.outcomes().splitlines()}
    assert lines["| PF2LoRA, α = 0.1"].count("–") == 5  # neither deployed nor run with mpnet on SST-2
    assert lines["| HOMLoRA, shared head"].count("–") == 0
    assert "| PF2LoRA, paper | 54.7 | 45.0 |" in script.squad()
