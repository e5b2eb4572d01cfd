"""Questions from SQuAD's JSON, from the hub and from users' files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from loading import load_clients, read_rows

from pf2lora.data.client import Client
from pf2lora.errors import UserError
from pf2lora.tasks.question_answering.rows import QuestionRow
from pf2lora.tasks.question_answering.settings import QuestionAnsweringSettings
from pf2lora.tasks.question_answering.squad import read_squad

CONTEXT = "The key is in the salt. The key is under the stone."


def read_questions(path: Path) -> list[QuestionRow]:
    return read_rows(path, task="question-answering")


def load_squad(name: str, path: Path, **settings: Any) -> list[Client[QuestionRow]]:
    return load_clients(task="question-answering", dataset=name, data_dir=path, **settings)


def article(title: str, questions: int, impossible: bool = False) -> dict[str, Any]:
    qas = [
        {
            "id": f"{title}-{i}",
            "question": f"Where is key {i}?",
            "answers": [] if impossible and i % 2 else [{"text": "The key", "answer_start": 24}],
        }
        for i in range(questions)
    ]
    return {"title": title, "paragraphs": [{"context": CONTEXT, "qas": qas}]}


def squad_file(path: Path, topics: int = 8, questions: int = 20, impossible: bool = False) -> Path:
    data = [article(f"topic {i}", questions, impossible) for i in range(topics)]
    path.write_text(json.dumps({"version": "1.1", "data": data}), encoding="utf8")
    return path


def test_official_json(tmp_path: Path) -> None:
    rows = read_squad("squad", squad_file(tmp_path / "train-v1.1.json").parent, [])
    assert len(rows) == 160
    assert (
        rows[21].id == "topic 1-1" and rows[21].topic == "topic 1" and rows[21].question == "Where is key 1?"
    )
    assert rows[21].starts == (24,) and rows[21].context[24:].startswith(rows[21].answers[0])


def test_the_papers_split_and_clients(tmp_path: Path) -> None:
    """80/20 by question; half of each topic in order, so a client has mostly its own topics; seeded."""
    path = squad_file(tmp_path / "train-v2.0.json", impossible=True)
    clients = load_squad("squad_v2", path, seed=1)
    assert [c.name for c in clients] == ["client-1", "client-2", "client-3", "client-4"]
    assert [len(c.train) for c in clients] == [32] * 4 and [len(c.test) for c in clients] == [8] * 4
    everything = [row.id for c in clients for row in [*c.train, *c.test]]
    assert len(set(everything)) == 160
    for k, client in enumerate(clients):
        own = sum(row.topic in (f"topic {2 * k}", f"topic {2 * k + 1}") for row in client.train)
        assert own >= 16
    assert clients == load_squad("squad_v2", path, seed=1)
    assert clients != load_squad("squad_v2", path, seed=2)
    sorted_out = load_squad("squad_v2", path, heterogeneity=1.0, num_clients=2)
    assert {row.topic for row in sorted_out[0].train}.isdisjoint(
        {row.topic for row in sorted_out[1].test} - {"topic 3", "topic 4"}
    )


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        answers = {"text": ["the salt"], "answer_start": [14]}
        return [
            {"id": "a", "title": "T", "context": CONTEXT, "question": "Where?", "answers": answers},
            {
                "id": "b",
                "title": "T",
                "context": CONTEXT,
                "question": "Why?",
                "answers": {"text": [], "answer_start": []},
            },
        ]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    rows = read_squad("squad_v2", None, [])
    assert asked == [("rajpurkar/squad_v2", "train")]
    assert [(r.answers, r.starts) for r in rows] == [(("the salt",), (14,)), ((), ())]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'pf2lora\[hub\]'"):
        read_squad("squad", None, [])


def test_users_files_in_every_form(tmp_path: Path) -> None:
    forms = [
        "the stone",
        ["the stone", "stone"],
        [{"text": "the stone", "answer_start": 41}],
        {"text": ["The key"], "answer_start": [24]},
        "",
        None,
        [],
    ]
    lines = [json.dumps({"context": CONTEXT, "question": "Where?", "answers": form}) for form in forms]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf8")
    rows = read_questions(tmp_path / "a.jsonl")
    assert [r.answers for r in rows] == [
        ("the stone",),
        ("the stone", "stone"),
        ("the stone",),
        ("The key",),
        (),
        (),
        (),
    ]
    assert [r.starts for r in rows] == [(41,), (41, 45), (41,), (24,), (), (), ()]
    assert len({r.id for r in rows}) == len(rows)
    (tmp_path / "b.csv").write_text(
        f'passage,query,answer\n"{CONTEXT}",Where?,"[""the stone"", ""stone""]"\n'
    )
    assert read_questions(tmp_path / "b.csv")[0].answers == ("the stone", "stone")


def test_clients_from_files(tmp_path: Path) -> None:
    for name in ("clinic", "office"):
        squad_file(tmp_path / f"{name}.json", topics=1, questions=10)
    clients = load_clients([tmp_path], task="question-answering", seed=0)
    assert [(c.name, len(c.train), len(c.test)) for c in clients] == [("clinic", 8, 2), ("office", 8, 2)]
    test = tmp_path / "test"
    test.mkdir()
    for name in ("clinic", "office"):
        squad_file(test / f"{name}.json", topics=1, questions=4)
    clients = load_clients([tmp_path / "*.json"], task="question-answering", test=[test])
    assert [(len(c.train), len(c.test)) for c in clients] == [(10, 4), (10, 4)]
    lines = [
        json.dumps({"site": site, "context": CONTEXT, "question": "Where?", "answers": "the salt"})
        for site in "ab" * 5
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    found = load_clients([tmp_path / "all.jsonl"], task="question-answering", client_column="site")
    assert [c.name for c in found] == ["a", "b"]


def test_answers_at_the_wrong_place_are_moved_and_counted(tmp_path: Path) -> None:
    row = {"context": CONTEXT, "question": "?", "answers": [{"text": "The key", "answer_start": 23}]}
    (tmp_path / "a.json").write_text(json.dumps([row, row | {"answers": "the salt"}]))
    notes: list[str] = []
    task = QuestionAnsweringSettings()
    assert task.rows(task.read_records(tmp_path / "a.json"), notes=notes)[0].starts == (24,)
    assert len(notes) == 1 and "1 questions have answers that are not at their stated place" in notes[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answers": "the moon"}, "line 1: the answer 'the moon' is not in its context"),
        ({"answers": [3]}, "line 1: 3 in 'answers' is not an answer"),
        ({"answers": [" "]}, "line 1: ' ' in 'answers' is not an answer"),
        ({"answers": [{"text": "salt", "answer_start": "14"}]}, "is not an answer"),
        ({"answers": "the salt", "question": " "}, "line 1: empty text in column 'question'"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"context": CONTEXT, "question": "Where?"} | row))
    with pytest.raises(UserError, match=message):
        read_questions(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": [\n{"title": }]}', r"a\.json, line 2, column 11: broken JSON"),
        ('{"date": []}', "data is no list of objects"),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": {}}]}]}',
            r"data\[0\]\.paragraphs\[0\]\.qas is no list",
        ),
        ('{"data": []}', "no questions in this file"),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "d"}]}]}]}]}',
            r"data\[0\]\.paragraphs\[0\]\.qas\[0\]: the answer 'd' is not in its context",
        ),
    ],
)
def test_bad_json_names_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_questions(tmp_path / "a.json")


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown data set for question-answering 'squad2'; did you mean"):
        load_clients(task="question-answering", dataset="squad2")
    with pytest.raises(UserError, match=r"train-v1\.1\.json: no such file"):
        read_squad("squad", tmp_path, [])


def test_the_real_files(shared_data: Path) -> None:
    notes: list[str] = []
    rows = read_squad("squad_v2", shared_data / "squad_partial" / "cs224n_dev-v2.0.json", notes)
    assert (
        len(rows) == 6078 and sum(not r.answers for r in rows) == 3168 and len({r.topic for r in rows}) == 16
    )
    assert notes == []
    assert all(r.context.startswith(a, s) for r in rows for a, s in zip(r.answers, r.starts))
    english = read_questions(shared_data / "squad_partial" / "xquad.en.json")
    assert len(english) == 1190 and len({r.topic for r in english}) == 48
