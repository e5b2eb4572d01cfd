"""Validation rows: how many, which, whose; and files of their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import load_clients

from pf2lora.data.client import Client
from pf2lora.data.split import split_validation
from pf2lora.errors import UserError


def split(count: int, ratio: float = 0.1, seed: int = 0) -> tuple[list[int], list[int]]:
    rows = list(range(count))
    return split_validation(rows, [row % 2 for row in rows], ratio, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("count", "ratio", "expected"),
    [
        (1, 0.1, 0),  # nothing to spare
        (2, 0.1, 1),
        (5, 0.1, 1),
        (10, 0.1, 2),  # a fifth, as that is not yet 20
        (99, 0.1, 19),
        (100, 0.1, 20),
        (150, 0.1, 20),
        (200, 0.1, 20),
        (300, 0.1, 30),  # a tenth, from here on
        (5000, 0.1, 500),
        (50_000, 0.1, 500),  # never more
        (10, 0.5, 5),
        (3, 0.99, 2),  # a row is left to learn from
        (1000, 0.0, 0),
        (3, 0.0, 0),
    ],
)
def test_how_many_rows(count: int, ratio: float, expected: int) -> None:
    train, validation = split(count, ratio)
    assert len(validation) == expected and len(train) == count - expected


@pytest.mark.parametrize("count", [2, 7, 40, 250])
def test_every_row_is_in_one_part_and_in_order(count: int) -> None:
    train, validation = split(count)
    assert sorted(train + validation) == list(range(count))
    assert train == sorted(train) and validation == sorted(validation)
    assert split(count) == (train, validation)
    if count > 7:
        assert split(count, seed=1) != (train, validation)


def test_shares_are_kept() -> None:
    """Seven in ten rows are of one label, two of another: so they are among the validation rows."""
    labels = ["a"] * 140 + ["b"] * 40 + ["c"] * 20
    train, validation = split_validation(labels, labels, 0.1, np.random.default_rng(0))
    assert Counter(validation) == {"a": 14, "b": 4, "c": 2}
    assert Counter(train) == {"a": 126, "b": 36, "c": 18}


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 3.0])
def test_a_ratio_that_is_none(ratio: float) -> None:
    with pytest.raises(UserError, match=r"the validation ratio is .*; it must be 0 \(none\) or below 1"):
        split(10, ratio)


# ---- as a run loads them ----


def write(folder: Path, name: str, count: int, first: int = 0) -> Path:
    rows = [{"text": f"{name} {first + i}", "label": "ab"[i % 2]} for i in range(count)]
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parts(client: Client[Any]) -> list[set[str]]:
    return [{row.text for row in own} for own in (client.train, client.validation, client.test)]


def test_a_client_sets_rows_aside_and_none_of_them_is_tested_on(tmp_path: Path) -> None:
    write(tmp_path, "north", 100), write(tmp_path, "south", 50)
    without = load_clients([tmp_path])
    for client, plain in zip(load_clients([tmp_path], validation_ratio=0.1), without):
        train, validation, test = parts(client)
        assert not (train & validation or train & test or validation & test)
        assert test == parts(plain)[2] and train | validation == parts(plain)[0]  # the test rows are the same
        assert {row.label for row in client.validation} == {"a", "b"}
        assert not plain.validation
    north, south = load_clients([tmp_path], validation_ratio=0.1)
    assert (len(north.train), len(north.validation), len(north.test)) == (64, 16, 20)
    assert (len(south.train), len(south.validation), len(south.test)) == (32, 8, 10)


def test_separate_test_files_are_not_touched(tmp_path: Path) -> None:
    file, test = write(tmp_path / "train", "north", 100), write(tmp_path / "test", "north", 10, 1000)
    (client,) = load_clients([file], test=[test], validation_ratio=0.1)
    assert (len(client.train), len(client.validation), len(client.test)) == (80, 20, 10)
    assert parts(client)[2] == {f"north {i}" for i in range(1000, 1010)}


def test_rows_are_drawn_by_name(tmp_path: Path) -> None:
    """Who else is there changes nothing, a seed does, and clients with the same rows have other ones."""
    names = ("north", "south", "west")
    files = [write(tmp_path / "train", name, 100) for name in names]
    tests = [write(tmp_path / "test", name, 10, 1000) for name in names]  # all else is the same for everybody

    def load(*k: int, seed: int = 0) -> list[Client[Any]]:
        chosen = [[paths[i] for i in k] for paths in (files, tests)]
        return load_clients(chosen[0], test=chosen[1], validation_ratio=0.1, seed=seed)

    together = load(0, 1, 2)
    assert load(1) == together[1:2] and load(2, 0) == [together[2], together[0]]
    assert load(0, 1, 2, seed=1)[1].validation != together[1].validation
    numbers = [{text.split()[1] for text in parts(client)[1]} for client in together]
    assert numbers[0] != numbers[1] and numbers[1] != numbers[2] and numbers[2] != numbers[0]


def test_files_of_their_own(tmp_path: Path) -> None:
    """All other rows are to learn from or to test on."""
    files = [write(tmp_path / "train", name, 40) for name in ("north", "south")]
    own = [write(tmp_path / "own", "north", 7, 1000), write(tmp_path / "own", "south", 6, 1000)]
    north, south = load_clients(files, validation=own, validation_ratio=0.1)
    assert [len(north.train), len(north.test)] == [32, 8]
    assert parts(north)[1] == {f"north {i}" for i in range(1000, 1007)}
    assert parts(south)[1] == {f"south {i}" for i in range(1000, 1006)}


def test_of_a_large_file_some_rows_are_drawn(tmp_path: Path) -> None:
    """By the seed, with the shares of its labels, by which it may be sorted; all of it is checked."""
    file, own = write(tmp_path / "train", "north", 40), tmp_path / "own" / "north.jsonl"
    own.parent.mkdir()
    lines = [json.dumps({"text": f"north {i}", "label": "a" if i < 1200 else "b"}) for i in range(1500)]
    own.write_text("\n".join(lines))

    def drawn(seed: int) -> list[Any]:
        (client,) = load_clients([file], validation=[own], seed=seed)
        return client.validation

    rows = drawn(0)
    assert Counter(row.label for row in rows) == {"a": 400, "b": 100}
    numbers = [int(row.text.split()[1]) for row in rows]
    assert numbers == sorted(numbers) and max(numbers) > 1400
    assert drawn(0) == rows != drawn(1)
    own.write_text("\n".join([*lines, json.dumps({"text": "last", "label": "c"})]))
    with pytest.raises(UserError, match="label 'c'"):
        drawn(0)


def test_bad_validation_files(tmp_path: Path) -> None:
    files = [write(tmp_path / "train", name, 40) for name in ("north", "south")]
    one = write(tmp_path / "own", "north", 6)
    with pytest.raises(
        UserError, match=r"client 'south' has no validation data \(there is some for: north\)"
    ):
        load_clients(files, validation=[one])
    with pytest.raises(UserError, match="client 'south' has validation data but nothing to train on"):
        load_clients(files[:1], validation=[one, write(tmp_path / "own", "south", 6)])
    with pytest.raises(UserError, match="--validation is for your own files, not for --dataset sst2"):
        load_clients(dataset="sst2", validation=[one])
    with pytest.raises(
        UserError, match="--validation files are named like the clients' files, and --partition"
    ):
        load_clients(files, validation=[one], partition="dirichlet", num_clients=2)
    bad = tmp_path / "bad" / "north.jsonl"
    bad.parent.mkdir()
    bad.write_text('{"text": "x", "label": "zebra"}\n')
    with pytest.raises(UserError, match="zebra"):
        load_clients(files[:1], validation=[bad])
    with pytest.raises(UserError, match="the validation ratio is 1"):
        load_clients(files, validation_ratio=1.0)
