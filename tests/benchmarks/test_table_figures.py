"""The figures that several calls' numbers make."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("table_figures")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_bars_of_several_files_are_one_group(script: ModuleType) -> None:
    groups = script.bars(script.FIGURES["generation"][1])
    assert {name: {row.method for row in rows} for name, rows in groups.items()} == {
        "webnlg": {"pf2lora", "homlora", "hetlora"},
        "auto": {"pf2lora"},
    }
    (homlora,) = [row for row in groups["webnlg"] if row.method == "homlora"]
    assert homlora.served.mean == pytest.approx(0.321, abs=5e-4)  # as docs/reproduction.md has it


def test_every_figure_is_drawn_and_shown(script: ModuleType, tmp_path: Path) -> None:
    page = (BENCHMARKS.parent / "docs" / "reproduction.md").read_text(encoding="utf8")
    for name in script.FIGURES:
        (file,) = script.draw(name, tmp_path)
        drawn = file.read_text(encoding="utf8")
        assert all(panel.label in drawn for panel in script.FIGURES[name])
        assert f"({file.name})" in page and (BENCHMARKS.parent / "docs" / file.name).is_file()
