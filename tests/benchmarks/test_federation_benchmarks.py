"""The scripts that measure a federation's wire and its server: a tiny run of each."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """The scripts as modules, imported as `python benchmarks/wire_score.py` finds them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return {name: importlib.import_module(name) for name in ("wire_score", "server_memory")}
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_each_wire_is_a_row_with_its_bytes(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tiny = [
        "--rounds",
        "3",
        "--steps",
        "1",
        "--sites",
        "2",
        "--rows",
        "16",
        "--seeds",
        "1",
        "--method",
        "homlora",
    ]
    monkeypatch.setattr("sys.argv", ["wire_score.py", *tiny])
    scripts["wire_score"].main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| float32", "| bfloat16", "| int8"]
    up, down = ([int(row[k].strip(" |").replace(",", "")) for row in rows] for k in (4, 5))
    assert up == down and up[0] == 2 * up[1] > 3.5 * up[2]
    assert [float(row[3].rstrip("%")) > 0 for row in rows] == [False, True, True]


def test_a_servers_memory_and_seconds_are_told(scripts: dict[str, ModuleType]) -> None:
    found = scripts["server_memory"].measure(3, 20_000, 3, "int8", "mean")
    assert found["sites"] == 3 and found["x MB"] == pytest.approx(0.1, abs=0.05)
    assert found["CPU seconds a round"] >= 0 and found["peak MB"] >= 0
