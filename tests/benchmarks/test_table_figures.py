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
        assert all(part in drawn for panel in script.FIGURES[name] for part in panel.label.split(", ", 1))
        assert f"({file.name})" in page and (BENCHMARKS.parent / "docs" / file.name).is_file()


def test_lines_are_of_what_every_file_has_with_the_papers_beside(script: ModuleType) -> None:
    _, cola = script.FIGURES["heterogeneity"]
    ours = script.lines(cola)
    assert set(ours) == {"homlora", "hetlora", "pf2lora"}
    assert all(sorted(line) == [0.3, 0.5, 0.7, 0.9, 1.0] for line in ours.values())
    assert (ours["pf2lora"][0.7].served.mean, ours["pf2lora"][0.7].served.deviation) == pytest.approx(
        (0.325, 0.035),
        abs=5e-4,  # as docs/reproduction.md has it
    )
    papers = script.papers_lines(cola, ours)
    assert papers.keys() == ours.keys()  # none of a method that was not run
    assert {at: row.paper for at, row in papers["pf2lora"].items()} == pytest.approx(
        {0.2: 0.562, 0.3: 0.5419, 0.4: 0.505}
    )
    _, cola = script.FIGURES["rank"]
    (pf2lora,) = script.lines(cola).values()  # bilevel's other method is not there at the other ranks
    assert sorted(pf2lora) == [4, 6, 8, 12, 16]
