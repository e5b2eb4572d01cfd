"""Rows in memory: the same clients as from files, whatever kind of table they are in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from little_world import World, command_line, make_world

import pf2lora
from pf2lora.data.memory import is_in_memory, read_tables
from pf2lora.errors import UserError
from pf2lora.run.events import Event, Note, RunEnded


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


class Labels:
    """A feature of `datasets` that has names for its numbers."""

    names = ("neg", "pos")


class Dataset:
    """As `datasets.Dataset`: rows one by one, labels as numbers."""

    column_names = ("text", "label")
    features = {"text": object(), "label": Labels()}  # noqa: RUF012

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            yield row | {"label": Labels.names.index(row["label"])}


def rows_of(world: World) -> dict[str, list[dict[str, str]]]:
    return {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in world.clients}


def test_rows_in_memory_train_as_rows_in_files(world: World, tmp_path: Path) -> None:
    rows = rows_of(world)
    expected = pf2lora.federate(**world.settings())
    mixed = {"north": rows["north"], "south": pd.DataFrame(rows["south"]), "west": Dataset(rows["west"])}
    found = pf2lora.federate(**world.settings(clients=mixed))
    assert found.served() == expected.served()
    everybody = pd.DataFrame([row | {"site": name} for name, own in rows.items() for row in own])
    together = pf2lora.federate(
        **world.settings(clients=everybody, client_column="site", out=tmp_path / "run")
    )
    assert together.served() == expected.served()
    again = world.settings(clients=everybody, client_column="site", out=tmp_path / "run", resume=True)
    heard: list[Event] = []
    ended = pf2lora.federate(**again, callbacks=[heard.append])
    assert ended.served() == expected.served()
    assert [type(event) for event in heard] == [Note, RunEnded]


def test_test_rows_may_be_in_memory_beside_files(world: World) -> None:
    test = {name: own[:10] for name, own in rows_of(world).items()}
    found = pf2lora.federate(**world.settings(test=test))
    assert [client.test for client in found.clients] == [10, 10, 10]


def test_a_command_says_that_the_rows_are_in_no_file(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    pf2lora.federate(**world.settings(clients=rows_of(world), out=tmp_path / "run"))
    args = ["train", tmp_path / "run" / "config.toml", "--out", tmp_path / "again"]
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "memory:north: these rows were given in Python" in err


def test_values_are_as_a_file_would_hold_them() -> None:
    frame = pd.DataFrame({"text": ["a", None], "stars": [1, 2], 7: [True, False]})
    first, second = read_tables("clients", {"north": frame})["north"]
    assert first.values == {"text": "a", "stars": 1, "7": True} and type(first.values["stars"]) is int
    assert second.is_missing("text") and second.where == "clients['north'], row 2"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"north": []}, "no table"),
        ({"north": pd.DataFrame({"text": []})}, "clients['north']: no rows"),
        ({"a/b": [{"text": "a"}]}, "cannot name a client"),
        ({3: [{"text": "a"}]}, "3 cannot name a client"),
        ({"north": 5}, "int is no table"),
        ([[{"text": "a"}], [{"text": "b"}]], "several of them as"),
        ({"north": [{"text": "a"}], "North": [{"text": "a"}]}, "would share a folder"),
    ],
)
def test_what_is_no_table_is_refused(value: Any, said: str) -> None:
    assert is_in_memory(value)
    with pytest.raises(UserError) as error:
        read_tables("clients", value)
    assert said in str(error.value)
