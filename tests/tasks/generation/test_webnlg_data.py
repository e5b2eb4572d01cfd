"""WebNLG: LoRA's form of the prompts, and clients by category."""

from __future__ import annotations

import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import pytest
from loading import load_clients

from pf2lora.data.client import Client
from pf2lora.errors import UserError
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.webnlg import read_webnlg


def load_webnlg(
    path: Path, clients: int | None = None, notes: list[str] | None = None
) -> list[Client[PromptRow]]:
    counted: dict[str, Any] = {} if clients is None else {"num_clients": clients}
    return load_clients(task="generation", dataset="webnlg", data_dir=path, notes=notes, **counted)


def entry(category: str, number: int, comment: str = "good") -> str:
    return (
        f'<entry category="{category}" eid="Id{number}" size="2"><modifiedtripleset>'
        f"<mtriple>A_{number} | is in | B</mtriple><mtriple>B | near | C</mtriple></modifiedtripleset>"
        f'<lex comment="good" lid="Id1">A{number} is in B.</lex>'
        f'<lex comment="{comment}" lid="Id2">In B is A.</lex></entry>'
    )


def benchmark(*entries: str) -> str:
    return f"<benchmark><entries>\n{''.join(entries)}\n</entries></benchmark>"


def folder(path: Path) -> Path:
    train = path / "webnlg" / "train" / "2triples"
    train.mkdir(parents=True)
    for category in ("City", "Food", "Airport"):
        text = benchmark(*[entry(category, i, "toFix" if i == 0 else "good") for i in range(4)])
        (train / f"{category}.xml").write_text(text, encoding="utf8")
    test = benchmark(entry("City", 7), entry("Food", 8), entry("Airport", 9), entry("Artist", 10))
    (path / "webnlg" / "testdata_with_lex.xml").write_text(test, encoding="utf8")
    return path


def test_clients_by_category(tmp_path: Path) -> None:
    notes: list[str] = []
    clients = load_webnlg(folder(tmp_path), clients=3, notes=notes)
    assert sorted(len(c.train) for c in clients) == [7, 7, 7]  # a row per good text
    for client in clients:
        assert {r.group for r in client.train} == {r.group for r in client.test}
        (row,) = client.test
        assert row.prompt.startswith("A_") and row.prompt.endswith(" : is in : B | B : near : C")
        assert len(row.targets) == 2
    assert notes == [
        "WebNLG: 3 train texts that are not marked 'good' are left out, as LoRA does",
        "WebNLG: 1 test entries of categories that are not in the training set (Artist) are left out",
    ]
    with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "webnlg", "data/webnlg")
    assert load_webnlg(tmp_path / "all.tar.xz", clients=3) == clients


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<benchmark>\n<entries>\n<entry></benchmark>", r"City\.xml, line 3, column \d+: broken XML"),
        (benchmark(entry("City", 1).replace('category="City"', "")), "entry Id1: no category"),
        (benchmark(entry("City", 1).replace("mtriple", "otriple")), "entry Id1: no modifiedtripleset"),
        (benchmark(entry("City", 1).replace(" | near | ", " near ")), "'B near C' is not a triple"),
        (benchmark(entry("City", 1).replace("In B is A.", " ")), "entry Id1: an empty text"),
        (benchmark(), "no entries in the train part"),
    ],
)
def test_bad_files_name_the_place(tmp_path: Path, text: str, message: str) -> None:
    place = tmp_path / "train"
    place.mkdir()
    (place / "City.xml").write_text(text, encoding="utf8")
    with pytest.raises(UserError, match=message):
        read_webnlg(tmp_path, "train")


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no WebNLG train files"):
        load_webnlg(tmp_path)
    with pytest.raises(UserError, match="no such file or folder"):
        load_webnlg(tmp_path / "nowhere")
    (tmp_path / "a.tar.xz").write_bytes(b"no archive")
    with pytest.raises(UserError, match="not a readable tar archive"):
        load_webnlg(tmp_path)


def test_equals_loras_dev_set(shared_data: Path) -> None:
    with lzma.open(shared_data / "webnlg2017" / "lora_dev.json.xz") as file:
        entries = [e[str(i)] for i, e in enumerate(json.load(file)["entries"], 1)]
    expected = [
        (
            e["category"],
            " | ".join(f"{t['subject']} : {t['property']} : {t['object']}" for t in e["modifiedtripleset"]),
            tuple(t["lex"] for t in e["lexicalisations"] if t["comment"] == "good"),
        )
        for e in entries
    ]
    assert len(expected) == 872
    notes: list[str] = []
    found = [
        (row.group, row.prompt, row.targets) for row in read_webnlg(shared_data / "webnlg2017", "dev", notes)
    ]
    assert sorted(found) == sorted(e for e in expected if e[2])
    assert notes[0].endswith("as LoRA does, and with them 1 entries that have no other")


def test_the_real_clients(shared_data: Path) -> None:
    notes: list[str] = []
    clients = load_webnlg(shared_data / "webnlg2017", notes=notes)
    assert len(clients) == 8
    assert sum(len(c.train) for c in clients) == 18025 and sum(len(c.test) for c in clients) == 971
    assert len({r.group for c in clients for r in c.train}) == 10
    for client in clients:
        assert {r.group for r in client.train} == {r.group for r in client.test}
    assert "891 test entries" in notes[1]
