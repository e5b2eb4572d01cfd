"""Data that is taken only with a word, or not at all: rows on both sides, large batches, nan, hidden files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from little_world import Row, sentences, write_csv, write_jsonl

from pf2lora.data.client import Client
from pf2lora.data.files import expand_paths
from pf2lora.data.loading import load_clients
from pf2lora.data.settings import DataSettings
from pf2lora.data.suspicions import few_rows, seen_before
from pf2lora.errors import UserError
from pf2lora.tasks.classification.settings import ClassificationSettings


def loaded(*files: Path, **settings: Any) -> tuple[list[Client[Any]], list[str]]:
    notes: list[str] = []
    data = DataSettings(clients=tuple(map(str, files)), **settings)
    return load_clients(ClassificationSettings(), data, 0, notes=notes), notes


def different(count: int) -> list[Row]:
    return [{"text": f"row {i}", "label": "pos" if i % 2 else "neg"} for i in range(count)]


def test_rows_that_are_trained_and_tested_on_are_told(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "north.jsonl", different(40))
    _, notes = loaded(file, test=(str(file),))
    (line,) = notes
    assert line.startswith("rows to train on are tested on, too: 32 of 40 test rows of client 'north';")
    _, notes = loaded(file, test=(str(file),), validation=(str(file),))
    assert len(notes) == 2 and "to choose by, too: 40 of 40 validation rows" in notes[1]
    assert loaded(file)[1] == []


def test_a_few_rows_that_occur_twice_are_no_news() -> None:
    rows = list(range(100))
    assert seen_before([Client("a", rows, [*range(5), *range(200, 295)])]) == []
    many = Client("a", rows, [*range(6), *range(200, 294)])
    (line,) = seen_before([many, Client("b", [1], [1]), Client("c", [1], [2]), Client("d", [1], [])])
    assert "6 of 100 test rows of client 'a', and 1 more clients" in line


def test_a_batch_far_above_a_client_s_rows_is_told() -> None:
    clients = [Client(name, list(range(rows)), []) for name, rows in (("a", 8), ("b", 3), ("c", 7))]
    assert few_rows(clients, 6) == []
    (line,) = few_rows(clients, 15)
    assert "--batch-size 15 is far above the 3 training rows of client 'b'" in line
    assert "and 1 more clients have too few" in line


@pytest.mark.parametrize("label", ["nan", "NaN", " NAN "])
def test_nan_is_no_label(tmp_path: Path, label: str) -> None:
    file = write_csv(tmp_path / "north.csv", [*sentences(9, 0), {"text": "a b", "label": label}])
    with pytest.raises(UserError, match=r"north.csv, line 11: the label 'n?N?.*' stands for a missing one"):
        loaded(file)


def test_a_hidden_file_is_nobody_s_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "north.jsonl", different(10))
    hidden = write_jsonl(tmp_path / ".hidden.jsonl", different(10))
    assert [c.name for c in loaded(tmp_path)[0]] == ["north"]
    assert expand_paths([str(tmp_path / "*.jsonl")]) == [tmp_path / "north.jsonl"]
    with pytest.raises(UserError, match=r"'.hidden' cannot name a client: .*it would be hidden"):
        loaded(hidden)
    only = write_jsonl(tmp_path / "only" / ".x.jsonl", different(10))
    with pytest.raises(UserError, match="no data file in this folder"):
        expand_paths([only.parent])
    column = write_csv(tmp_path / "all.csv", [{**row, "who": ".a"} for row in different(10)])
    with pytest.raises(UserError, match=r"line 2: '\.a' cannot name a client"):
        loaded(column, client_column="who")
