"""`pf2lora predict`: data files are read as in training, every task answers, rows come back with their answers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from little_world import FAST, LEARNING, World, command_line, make_world, sentences, write_csv, write_jsonl
from tiny_tasks import write_generation_task, write_question_task

import pf2lora
from pf2lora.data.files import read_records

TINY: dict[str, Any] = {"rounds": 1, "steps": 1, "batch_size": 2, "rank": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    pf2lora.federate(**world.settings(**LEARNING, out=world.root / "learned"))
    return world


@pytest.fixture
def run(world: World) -> Path:
    return world.root / "learned"


def answered(monkeypatch: pytest.MonkeyPatch, capsys: Any, *args: Any) -> list[dict[str, Any]]:
    code, out, err = command_line(monkeypatch, capsys, "predict", *args, "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_data_files_texts_are_answered_and_its_labels_are_not_read(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = sentences(12, seed=4)
    write = write_csv if kind == "csv" else write_jsonl
    file = write(tmp_path / f"rows.{kind}", rows)
    lies = write(tmp_path / f"lies.{kind}", [{"text": r["text"], "label": "never seen"} for r in rows])
    bare = write(tmp_path / f"bare.{kind}", [{"text": r["text"]} for r in rows])
    whose = ("--client", "north", "--file")
    found = answered(monkeypatch, capsys, run, *whose, file)
    typed = answered(monkeypatch, capsys, run, "--client", "north", *(r["text"] for r in rows))
    assert [f["text"] for f in found] == [r["text"] for r in rows]
    assert [f["label"] for f in found] == [r["label"] for r in rows]  # the file's own columns are kept
    for other in (typed, answered(monkeypatch, capsys, run, *whose, lies)):
        assert [f["predicted"] for f in other] == [f["predicted"] for f in found]
    assert [f["predicted"] for f in answered(monkeypatch, capsys, run, *whose, bare)] == [
        f["predicted"] for f in found
    ]
    for f in found:
        shares = {label: f[f"probability_{label}"] for label in ("neg", "pos")}
        assert np.isclose(sum(shares.values()), 1) and f["probability"] == max(shares.values())
        assert f["predicted"] == max(shares, key=lambda label: shares[label])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_rows_come_back_with_their_answers(
    suffix: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = [{"text": f'a "quoted", {r["text"]}', "id": str(i)} for i, r in enumerate(sentences(5, seed=4))]
    file, out = write_csv(tmp_path / "rows.csv", rows), tmp_path / f"found{suffix}"
    args = ["predict", run, "--client", "north", "--file", file, "--out", out]
    code, printed, err = command_line(monkeypatch, capsys, *args)
    assert code == 0 and printed == "" and "5 rows with what north answers" in err
    if suffix == ".tsv":
        with out.open(newline="") as opened:
            found = list(csv.DictReader(opened, delimiter="\t"))
    else:
        found = [record.values for record in read_records(out)]
    assert [(f["text"], f["id"]) for f in found] == [(r["text"], r["id"]) for r in rows]
    assert all(float(f["probability_pos"]) + float(f["probability_neg"]) == pytest.approx(1) for f in found)
    before = out.read_bytes()
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "exists" in err and out.read_bytes() == before
    assert command_line(monkeypatch, capsys, *args, "--force")[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to predict"),
        (["", "good"], "an empty text"),
        (["one", "--file", "rows.csv"], "not both"),
        (["one", "--out", "found.xlsx"], "unknown kind of file '.xlsx'"),
        (["one", "--out", "nowhere/found.csv"], "there is no folder 'nowhere'"),
        (["--file", "other.csv"], "no column looks like the text"),
    ],
)
def test_what_cannot_be_predicted(
    args: list[str], message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "rows.csv", sentences(3, 1))
    write_csv(tmp_path / "other.csv", [{"a": "1"}])
    code, out, err = command_line(monkeypatch, capsys, "predict", run, *args)
    assert code == 2 and message in err and out == "" and len(err.splitlines()) == 1


def test_questions_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model, files = write_question_task(tmp_path, ["north", "south"])
    settings: dict[str, Any] = {"task": "question-answering", "max_length": 32, "stride": 4}
    pf2lora.federate(clients=files, model=model, out=tmp_path / "run", method="pf2lora", **settings, **TINY)
    found = answered(monkeypatch, capsys, tmp_path / "run", "--client", "north", "--file", files[0])
    assert all(f["predicted"] in f["context"] and 0 <= f["no_answer_probability"] <= 1 for f in found)
    line = f"{found[0]['question']}\t{found[0]['context']}"
    typed = answered(monkeypatch, capsys, tmp_path / "run", "--client", "north", line)
    assert typed[0]["predicted"] == found[0]["predicted"]
    code, _, err = command_line(monkeypatch, capsys, "predict", tmp_path / "run", "where is the key ?")
    assert code == 2 and "a question needs its context" in err


@pytest.mark.usefixtures("no_java")
def test_prompts_are_continued_as_generate_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, files = write_generation_task(tmp_path, ["north", "south"])
    settings: dict[str, Any] = {"task": "generation", "max_length": 48, "max_new_tokens": 4, "beams": 1}
    pf2lora.federate(clients=files, model=model, out=tmp_path / "run", method="pf2lora", **settings, **TINY)
    prompts = [record.values["prompt"] for record in read_records(files[0])]
    whose = (tmp_path / "run", "--client", "north")
    found = answered(monkeypatch, capsys, *whose, "--file", files[0])
    code, out, err = command_line(monkeypatch, capsys, "generate", *whose, *prompts, "--json")
    assert code == 0, err
    assert [f["predicted"] for f in found] == [f["text"] for f in json.loads(out)]


def test_a_run_of_several_methods_says_which_it_takes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    settings = FAST | {"rounds": 1, "steps": 1}
    pf2lora.federate(**world.settings(**settings, method=["homlora", "local"], out=tmp_path / "two"))
    args = ("predict", tmp_path / "two", "--client", "north", "the film was superb")
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 0 and err == "method homlora, the run's first (--method takes another: local)\n"
    assert command_line(monkeypatch, capsys, *args, "--method", "local")[2] == ""


def test_columns_are_named_as_in_training(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = sentences(8, seed=4)
    odd = [{"text": "nothing", "words": r["text"], "mood": r["label"]} for r in rows]
    file = write_csv(tmp_path / "odd.csv", odd)
    plain = write_csv(tmp_path / "plain.csv", rows)
    whose = ("--client", "north", "--json")
    wanted = command_line(monkeypatch, capsys, "evaluate", run, plain, *whose)[1]
    named = ("--text", "words", "--label", "mood")
    assert command_line(monkeypatch, capsys, "evaluate", run, file, *named, *whose)[1] == wanted
    found = answered(monkeypatch, capsys, run, "--client", "north", "--file", file, "--text", "words")
    plainly = answered(monkeypatch, capsys, run, "--client", "north", "--file", plain)
    assert [f["predicted"] for f in found] == [f["predicted"] for f in plainly]
    code, _, err = command_line(monkeypatch, capsys, "evaluate", run, file, "--context", "words")
    assert code == 2 and "--context is not for classification, whose columns are named by --text" in err
