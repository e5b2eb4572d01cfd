"""The benchmark of serving: both ways write the same texts, and every case is a row."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_case_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    script = importlib.import_module("serving_speed")
    file = tmp_path / "rows.json"
    sizes = ["--clients", "1", "3", "--prompt", "4", "--tokens", "5", "--repeat", "1", "--device", "cpu"]
    script.main(["--models", "small-gpt2", "small-llama", *sizes, "--json", str(file)])
    rows = json.loads(file.read_text())
    assert [(row["model"], row["clients"]) for row in rows] == [
        (model, clients) for model in ("small-gpt2", "small-llama") for clients in (1, 3)
    ]
    assert all(row["same_texts"] == f"{row['clients']} of {row['clients']}" for row in rows)
    assert all(row["together_tokens_per_second"] > 0 for row in rows)
