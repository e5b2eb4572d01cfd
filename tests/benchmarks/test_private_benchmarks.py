"""The scripts that measure what privacy costs and what an attack gets: figures by hand, and a tiny run of each."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'pf2lora[privacy]')")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """The scripts as modules, imported as `python benchmarks/dp_cost.py` finds them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return {name: importlib.import_module(name) for name in ("small_texts", "dp_cost", "membership")}
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_auc_is_the_chance_to_rank_a_member_first(scripts: dict[str, ModuleType]) -> None:
    auc = scripts["membership"].auc
    assert auc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0])) == (1 + 1 + 0.5 + 1) / 4
    assert auc(torch.tensor([1.0]), torch.tensor([2.0, 3.0])) == 1.0
    assert auc(torch.tensor([4.0]), torch.tensor([2.0, 3.0])) == 0.0


def test_more_clients_leave_the_first_as_they_are(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    few, many = (scripts["small_texts"].write_clients(tmp_path / str(n), n, 5) for n in (2, 4))
    assert [Path(f).read_text() for f in few] == [Path(f).read_text() for f in many[:2]]
    rows = [json.loads(line) for line in Path(many[3]).read_text().splitlines()]
    assert len(rows) == 5 and all(len(row["text"].split()) == 7 for row in rows)


def test_what_privacy_costs_is_a_line_a_table_and_a_figure(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = scripts["dp_cost"]
    monkeypatch.setattr(cost, "SETTINGS", cost.SETTINGS | {"rounds": 1, "steps": 1})
    monkeypatch.setattr(cost, "EPSILONS", (float("inf"), 8.0))
    out = tmp_path / "out.jsonl"
    done = cost.runs(out, [3], 2)
    assert cost.read(out) == done and len(done) == 5
    assert [d["noise"] > 0 for d in done] == [False, False, True, False, True]
    assert cost.runs(out, [3], 2) == done  # nothing is done again
    lines = cost.table(done).splitlines()
    assert lines[0] == "| clients | method | no noise | ε = 8 |" and len(lines) == 5
    assert lines[2].startswith("| 3 | local | ") and lines[2].endswith("|  |")
    cost.figure(done, tmp_path / "dp.svg")
    assert "<svg" in (tmp_path / "dp.svg").read_text(encoding="utf8")


def test_an_attack_is_reported_for_what_is_served_and_what_is_common(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    settings = ["--world", "texts", "--clients", "3", "--rounds", "1", "--seeds", "1", "--epsilons", "4"]
    monkeypatch.setattr("sys.argv", ["membership.py", *settings, "--methods", "local", "pf2lora"])
    scripts["membership"].main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| local", "none", "served"],
        *(["| pf2lora", noise, what] for noise in ("none", "ε = 4") for what in ("served", "common adapter")),
    ]
    assert all(0 <= float(row.split(" | ")[3].split()[0]) <= 1 for row in rows)
