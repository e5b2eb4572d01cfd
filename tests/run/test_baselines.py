"""What no training gives, and what went wrong with what was trained: round 0, majority label, confusion, examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from little_world import FAST, SECRETS, World, command_line, make_world, opened, sentences, write_jsonl

import pf2lora
from pf2lora.run.comparison import place_of
from pf2lora.run.confusion import macro_f1, of_label
from pf2lora.run.result import Result, load_result
from pf2lora.tasks.classification.rows import TextRow
from pf2lora.tasks.classification.task import Classification
from pf2lora.tasks.question_answering.rows import QuestionRow
from pf2lora.tasks.question_answering.task import QuestionAnswering


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    write_jsonl(world.root / "clients" / "all.jsonl", [{"text": "the film", "label": "pos"}] * 12)
    settings = {"method": ["centralized", "per-fedavg"], "examples": 2, "out": world.root / "run"}
    pf2lora.federate(**world.settings(**settings))
    return world


@pytest.fixture(scope="module")
def result(world: World) -> Result:
    return load_result(world.root / "run")


def test_round_0_is_the_model_before_any_step(world: World, result: Result) -> None:
    """With a rate of nothing, training leaves it where it was."""
    still = pf2lora.federate(**world.settings(method=["homlora"], rounds=1, lr=1e-12, weight_decay=0.0))
    served = still.methods["homlora"].runs[0].served
    for found in (still, result):
        scores = found.baselines["untrained"].scores
        assert scores["loss"].per_client == pytest.approx(served["loss"].per_client, abs=1e-6)
        assert scores["accuracy"].per_client == served["accuracy"].per_client


def test_the_majority_label_is_each_clients_own(result: Result) -> None:
    scores = result.baselines["trivial"].scores
    assert result.baselines["trivial"].label == "majority label"
    by_name = dict(zip([c.name for c in result.clients], scores["accuracy"].per_client))
    assert by_name["all"] == 1.0
    assert scores["matthews"].per_client[0] is None  # one label: undefined
    assert all(value == 0 for value in scores["matthews"].per_client[1:])


def test_the_majority_labels_scores_by_hand() -> None:
    task: Any = Classification.__new__(Classification)
    task.labels, task.metrics = ["a", "b"], dict.fromkeys(("accuracy", "matthews", "loss"))
    train = [TextRow("x", "a")] * 3 + [TextRow("x", "b")]
    test = [TextRow("y", "a")] * 2 + [TextRow("y", "b")] * 2
    scores = task.trivial(train, test)
    assert scores["accuracy"] == 0.5
    assert scores["loss"] == pytest.approx(-(np.log(0.75) + np.log(0.25)) / 2)
    assert task.trivial(train[:3], test)["loss"] == pytest.approx(-(np.log(6 / 7) + np.log(1 / 7)) / 2)


def test_of_questions_no_answer_is_trivial_only_where_there_may_be_none() -> None:
    rows = [QuestionRow("1", "c", "q", (), ()), QuestionRow("2", "the c", "q", ("c",), (4,))]
    task: Any = QuestionAnswering.__new__(QuestionAnswering)
    task.no_answers, task.metrics = False, {"f1": None, "loss": None}
    assert task.trivial(rows, rows) is None
    task.no_answers = True
    assert task.trivial(rows, rows) == {"f1": 0.5, "loss": None}


def test_confusion_is_of_what_clients_deploy(result: Result) -> None:
    assert result.labels == ["neg", "pos"]
    for method in result.methods.values():
        (run,) = method.runs
        assert run.confusion is not None
        for k, table in enumerate(run.confusion):
            assert table is not None and sum(map(sum, table)) == result.clients[k].test
            right = sum(table[i][i] for i in range(2)) / result.clients[k].test
            assert right == pytest.approx(run.served["accuracy"].per_client[k])


def test_f1_by_hand() -> None:
    table = [[8, 2], [4, 6]]
    assert of_label(table, 0) == pytest.approx((8 / 12, 0.8, 2 * 8 / 22, 10))
    assert of_label(table, 1) == pytest.approx((6 / 8, 0.6, 2 * 6 / 18, 10))
    nobody = [[3, 0], [0, 0]]
    assert of_label(nobody, 1) == (None, None, None, 0)  # neither there nor answered
    assert of_label([[3, 0], [2, 0]], 1) == (None, 0.0, 0.0, 2)
    assert macro_f1(table) == pytest.approx((16 / 22 + 12 / 18) / 2) and macro_f1(nobody) == 1.0


def test_examples_are_wrong_ones_and_their_texts_are_kept_where_that_is_asked_for(
    world: World, result: Result, tmp_path: Path
) -> None:
    assert result.examples
    for example in result.examples:
        for method, output in example.outputs.items():
            assert method in result.methods and output.split()[0] != example.references[0]
    assert {e.client for e in result.examples} <= {c.name for c in result.clients}
    pf2lora.federate(**world.settings(method="homlora", rounds=1, out=tmp_path / "run"))
    assert load_result(tmp_path / "run").examples == []
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or not any(s.encode() in file.read_bytes() for s in SECRETS.values())


def test_evaluate_shows_what_is_wrong(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = write_jsonl(tmp_path / "more.jsonl", sentences(40, seed=4))
    args = ["evaluate", world.root / "run", file, "--client", "north", "--method", "per-fedavg"]
    _, out, _ = command_line(monkeypatch, capsys, *args, "--examples", "3")
    assert out.count("right: ") == 3 and "answered: " in out
    _, plain, _ = command_line(monkeypatch, capsys, *args)
    assert "right: " not in plain and "precision" in plain and "mean F1" in plain
    found = json.loads(command_line(monkeypatch, capsys, *args, "--json")[1])
    assert set(found["labels"]) == {"neg", "pos"} and sum(of["rows"] for of in found["labels"].values()) == 40


def test_the_title_names_the_data(world: World, result: Result, tmp_path: Path) -> None:
    (tmp_path / "clinics" / "data").mkdir(parents=True)
    assert result.title == f"Centralized LoRA and Per-FedAvg-LoRA on {world.root.name}, 4 clients"
    for files, name in (
        ([tmp_path / "clinics" / "data"], "clinics"),
        ([tmp_path / "clinics" / "*.jsonl"], "clinics"),
        ([tmp_path / "clinics" / "a.csv", tmp_path / "clinics" / "b.csv"], "clinics"),
        ([tmp_path / "reviews.csv.gz"], "reviews"),
        ([tmp_path / "a" / "x.csv", tmp_path / "b" / "y.csv"], ""),
        ([], ""),
    ):
        assert place_of(files) == name


def test_the_terminal_has_them(world: World, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pf2lora.cli.show import console, show_result

    with console.capture() as captured:
        show_result(load_result(world.root / "run"), None)
    assert "untrained (round 0)" in captured.get() and "majority label" in captured.get()
    assert FAST["validation_ratio"] == 0 and opened(world.root / "run", "per-fedavg")
