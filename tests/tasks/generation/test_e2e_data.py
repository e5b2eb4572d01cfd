"""E2E: LoRA's form of the prompts, and clients by restaurant."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from loading import load_clients

from pf2lora.data.client import Client
from pf2lora.errors import UserError
from pf2lora.tasks.generation.e2e import TEST, TRAIN, linearise, parse_meaning, read_e2e
from pf2lora.tasks.generation.prompts import PromptRow


def load_e2e(path: Path, clients: int | None = None) -> list[Client[PromptRow]]:
    counted: dict[str, Any] = {} if clients is None else {"num_clients": clients}
    return load_clients(task="generation", dataset="e2e", data_dir=path, **counted)


def line(name: str, text: str = "A pub.") -> str:
    return f'"name[{name}], eatType[pub], priceRange[£20-25]","{text}"'


def folder(path: Path, train: list[str], test: list[str]) -> Path:
    for file, lines in ((TRAIN, train), (TEST, test)):
        (path / file).write_text("\n".join(["mr,ref", *lines]), encoding="utf8")
    return path


def test_meaning_as_in_loras_files() -> None:
    slots = parse_meaning("name[The Eagle], eatType[coffee shop], priceRange[£20-25], familyFriendly[no]")
    assert slots is not None
    assert (
        linearise(slots) == "name : The Eagle | Type : coffee shop | price : £ 20 - 25 | family friendly : no"
    )
    assert parse_meaning("name[The Eagle") is None


def test_clients_are_tested_on_restaurants_they_know(tmp_path: Path) -> None:
    train = [line(name, f"{name} {i}.") for name, n in zip("ABCDEF", (9, 7, 5, 3, 2, 1)) for i in range(n)]
    test = [line("C"), line("C", "Another."), line("A"), line("F")]
    clients = load_e2e(folder(tmp_path, train, test), clients=3)
    assert sum(len(c.train) for c in clients) == 27 and sum(len(c.test) for c in clients) == 3
    for client in clients:
        assert client.test and {r.group for r in client.test} <= {r.group for r in client.train}
    (c_row,) = [r for client in clients for r in client.test if r.group == "C"]
    assert c_row.targets == ("A pub.", "Another.")
    with zipfile.ZipFile(tmp_path / "e2e-dataset.zip", "w") as archive:
        for file in (TRAIN, TEST):
            archive.write(tmp_path / file, f"e2e-dataset/{file}")
            (tmp_path / file).unlink()
    assert load_e2e(tmp_path, clients=3) == load_e2e(tmp_path / "e2e-dataset.zip", clients=3) == clients


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["food[Thai],x"], "line 2: 'food\\[Thai\\]' is no meaning representation"),
        ([line("A"), '"name[A","x"'], "line 3: 'name\\[A' is no meaning"),
        ([line("A", "two\nlines"), line("A", " ")], "line 4: empty target in column 'ref'"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_e2e(folder(tmp_path, lines, lines), TRAIN)


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither trainset\.csv nor e2e-dataset\.zip"):
        load_e2e(tmp_path)
    (tmp_path / "e2e-dataset.zip").write_bytes(b"no zip")
    with pytest.raises(UserError, match="not a readable zip"):
        load_e2e(tmp_path)
    with pytest.raises(UserError, match="the test rows of 'Z' have no training rows"):
        load_e2e(folder(tmp_path, [line("A"), line("B")], [line("Z")]), clients=1)
    with pytest.raises(UserError, match="3 clients for 2 different values"):
        load_e2e(folder(tmp_path, [line("A"), line("B"), line("C")], [line("A"), line("B")]), clients=3)


@pytest.mark.parametrize(("file", "lora"), [(TEST, "lora_test.txt"), ("devset.csv", "lora_valid.txt")])
def test_equals_loras_files(shared_data: Path, file: str, lora: str) -> None:
    """Prompts are equal; LoRA's texts have spaces around punctuation, and are equal without any."""
    rows = read_e2e(shared_data / "e2e", file)
    expected = [
        line.split("||") for line in (shared_data / "e2e" / lora).read_text("utf8").split("\n") if line
    ]
    assert [row.prompt for row in rows] == [prompt for prompt, _ in expected]
    assert ["".join(row.targets[0].split()) for row in rows] == [
        "".join(text.split()) for _, text in expected
    ]


def test_the_real_clients(shared_data: Path) -> None:
    clients = load_e2e(shared_data / "e2e")
    assert len(clients) == 8
    assert sum(len(c.train) for c in clients) == 42061 and sum(len(c.test) for c in clients) == 630
    assert sum(len(r.targets) for c in clients for r in c.test) == 4693
    assert len({r.group for c in clients for r in c.train}) == 34
    assert len({r.group for c in clients for r in c.test}) == 18
    for client in clients:
        assert {r.group for r in client.test} <= {r.group for r in client.train}
        others = {r.group for c in clients if c is not client for r in c.train}
        assert others.isdisjoint({r.group for r in client.train})
    sizes = [len(c.train) for c in clients]
    assert max(sizes) < 1.1 * min(sizes)
