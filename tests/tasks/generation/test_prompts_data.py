"""Prompts and targets from users' files, and clients whose rows are split or grouped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loading
import pytest

from pf2lora.data.client import Client
from pf2lora.data.sharing import covered_groups
from pf2lora.errors import UserError
from pf2lora.tasks.generation.prompts import PromptRow, grouped, read_prompts


def load_clients(paths: list[Path], **settings: Any) -> list[Client[PromptRow]]:
    return loading.load_clients(paths, task="generation", **settings)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf8")
    return path


def test_one_file_per_client(tmp_path: Path) -> None:
    for name in ("north", "south"):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}", "target": f"t{i}"} for i in range(10)])
    clients = load_clients([tmp_path], seed=3)
    assert [(c.name, len(c.train), len(c.test)) for c in clients] == [("north", 8, 2), ("south", 8, 2)]
    assert {r.prompt for r in clients[0].train + clients[0].test} == {f"north {i}" for i in range(10)}
    alone = load_clients([tmp_path / "south.jsonl"], seed=3)
    assert alone == clients[1:]  # who else takes part does not change a client's split
    assert load_clients([tmp_path], seed=4) != clients


def test_test_files_and_client_column(tmp_path: Path) -> None:
    rows = [{"site": s, "input": f"p{i}", "completion": "t"} for i, s in enumerate("ab" * 4)]
    train, test = jsonl(tmp_path / "all.jsonl", rows), jsonl(tmp_path / "test.jsonl", rows[:2])
    clients = load_clients([train], client_column="site", test=[test])
    assert [(c.name, len(c.train), len(c.test)) for c in clients] == [("a", 4, 1), ("b", 4, 1)]
    with pytest.raises(UserError, match="client 'b' has no test data"):
        load_clients([train], client_column="site", test=[jsonl(tmp_path / "one.jsonl", rows[:1])])


def test_several_targets_and_named_columns(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"q": "a", "prompt": "no", "r": ["x", "y"]},
        *({"q": "b", "prompt": "no", "r": "[z]"} for _ in range(4)),
    ]
    (client,) = load_clients([jsonl(tmp_path / "a.jsonl", rows)], prompt="q", target="r")
    targets = {row.prompt: row.targets for row in client.train + client.test}
    assert targets == {"a": ("x", "y"), "b": ("[z]",)}
    (tmp_path / "b.csv").write_text("prompt,target\n" + 'p,"[""x"", ""y""]"\n' * 4)
    (client,) = load_clients([tmp_path / "b.csv"])
    assert client.train[0].targets == ("x", "y")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "target": " "}, "line 5: empty target in column 'target'"),
        ({"prompt": "p", "target": []}, "line 5: empty target in column 'target'"),
        ({"prompt": "p"}, "line 5: empty target in column 'target'"),
        ({"prompt": "p", "target": ["x", ""]}, "line 5: column 'target' holds an empty target"),
        ({"prompt": "p", "target": 7}, "line 5: column 'target' holds 7, not a text"),
        ({"prompt": "", "target": "t"}, "line 5: empty text in column 'prompt'"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"prompt": "p", "target": "t"}] * 4 + [row]
    with pytest.raises(UserError, match=message):
        load_clients([jsonl(tmp_path / "a.jsonl", rows)])


def test_missing_columns_and_too_few_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column looks like the target; name it with --target"):
        load_clients([jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "note": "t"}] * 4)])
    with pytest.raises(UserError, match="client 'b' has 3 rows; at least 4 are needed"):
        load_clients([jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "target": "t"}] * 3)])


def test_prompts_to_continue(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "a.txt") == (["one", "two"], [])
    lines, records = read_prompts(jsonl(tmp_path / "a.jsonl", [{"prompt": "three"}]))
    assert not lines and [record.values for record in records] == [{"prompt": "three"}]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="no prompts in this file"):
        read_prompts(tmp_path / "empty.txt")


def test_rows_of_one_prompt_together() -> None:
    rows = [PromptRow("a", ("1",), "g"), PromptRow("b", ("2",)), PromptRow("a", ("3", "4"), "g")]
    assert grouped(rows) == [PromptRow("a", ("1", "3", "4"), "g"), PromptRow("b", ("2",))]


def test_every_group_has_something_to_be_tested_on() -> None:
    train = [name for name, n in zip("ABCDEFG", (50, 40, 30, 20, 10, 5, 1)) for _ in range(n)]
    groups = covered_groups(train, ["E", "F", "G"], 3)
    assert sorted(name for members in groups.values() for name in members) == list("ABCDEFG")
    assert all(set(members) & set("EFG") for members in groups.values())
    sizes = [sum(train.count(name) for name in members) for members in groups.values()]
    assert max(sizes) - min(sizes) <= 20
