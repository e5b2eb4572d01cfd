"""The notebook runs from its first cell to its last, and its stored outputs are those of its code."""

from __future__ import annotations

import shutil
from pathlib import Path

import notebook
import pytest
from little_world import write_model


def test_the_stored_outputs_are_of_this_code() -> None:
    stored = notebook.read()
    assert stored.metadata.get(notebook.RECORDED) == notebook.digest(stored), "make notebook"
    assert [cell.execution_count for cell in notebook.code_cells(stored)] == [
        *range(1, len(notebook.code_cells(stored)) + 1)
    ]


def test_it_runs_and_shows_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model: other numbers, the same tables, columns, names, files and pictures."""
    monkeypatch.setenv("MODEL", str(write_model(tmp_path / "model")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = tmp_path / "examples"
    shutil.copytree(notebook.NOTEBOOK.parent / "own-files", place / "own-files")
    shutil.copy(notebook.NOTEBOOK, place)
    ran = notebook.executed(place / notebook.NOTEBOOK.name)
    for cell, before in zip(notebook.code_cells(ran), notebook.code_cells(notebook.read()), strict=True):
        assert notebook.essentials(cell) == notebook.essentials(before), f"{cell.id}: stale; make notebook"
    assert (place / "runs" / "notebook" / "report.html").is_file()
