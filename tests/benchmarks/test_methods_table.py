"""The numbers of docs/methods.md are those of the recorded runs."""

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
    assert page == script.filled(page), "python benchmarks/methods_table.py"
    _, _, table = page.partition(script.BEGIN)
    assert table.count("\n| ") > 6 and "| regret | mean |" in table
    for name in METHODS.own:
        assert f"`{name}`" in page  # what it does, costs and is good for
