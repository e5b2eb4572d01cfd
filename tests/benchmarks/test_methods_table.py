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


@pytest.mark.parametrize("name", ["outcome_tables", "paper_tables", "rules_tables"])
def test_tables_of_the_docs_are_those_of_the_stored_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module(name)
    page = script.PAGE.read_text(encoding="utf8")
    assert page == script.page_with_tables(page), f"python benchmarks/{name}.py"


def test_what_decides_an_outcome_and_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("outcome_tables")
    lines = {line.split(" | ")[0]: line for line in script.outcomes().splitlines()}
    assert lines["| PF2LoRA, α = 0.1"].count("–") == 5  # neither deployed nor run with mpnet on SST-2
    assert lines["| HOMLoRA, shared head"].count("–") == 0
    assert "| PF2LoRA, paper | 54.7 | 45.0 |" in script.squad()
    (webnlg,) = (line for line in script.promise().splitlines() if "WebNLG" in line)
    # a head's variants are HOMLoRA itself there: four runs, and the candidate of one
    assert "| 5 | 0.4 ± 0.4 | 5.6 ± 0.1 | yes | lr 0.009; 1/√K |" in webnlg
    assert "| WebNLG, SmolLM2, HOMLoRA | 94.7 ± 0.1 | 100.2 ± 0.7 | 94.5 ± 0.2 |" in script.steps_alone()


def test_the_paper_s_numbers_stand_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("paper_tables").tables()
    assert (
        "| PF2LoRA | 0.001 / 0.001 | 95.85 | 91.7 ± 0.5 | 96.0 ± 0.4 | 0.002 / 0.0001 | 54.19 |"
        in tables["glue"]
    )
    of_rows_alone = tables["more parameters"].partition("| HOMLoRA |")[2].partition("\n")[0]
    assert of_rows_alone.endswith("| 0.001 | 52.01 | 53.1 ± 1.0 | 48.2 ± 3.1 |")  # rates of the preset
    assert tables["rank"].count("–") == 0  # r = 8 on CoLA is of another preset's run
