"""Clients with hardly any data, with one row throughout, or with one label: they train, or are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from little_world import sentences, write_model
from tiny_tasks import write_generation_task, write_question_task, write_rows

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run.result import Result

pytestmark = pytest.mark.usefixtures("no_java")

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "steps": 2,
    "batch_size": 8,
    "rank": 2,
    "client_rank": 1,
    "personal_steps": 2,
    "device": "cpu",
}


def classification(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    return {"model": write_model(folder / "model")}, list(sentences(40, 0))


def questions(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    model, files = write_question_task(folder, ["a"])
    return {"model": model, "task": "question-answering", "max_length": 24, "stride": 4}, rows_of(files[0])


def generation(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    model, files = write_generation_task(folder, ["a"])
    settings = {"model": model, "task": "generation", "max_length": 48, "max_new_tokens": 4}
    return settings, rows_of(files[0])


def rows_of(file: Path) -> list[Any]:
    return 3 * [json.loads(line) for line in file.read_text().splitlines()]


TASKS = [classification, questions, generation]
Task = Callable[[Path], tuple[dict[str, Any], list[Any]]]


def trained(folder: Path, settings: dict[str, Any], parts: dict[str, dict[str, list[Any]]]) -> Result:
    """A run of clients whose parts (clients, test, validation) are these rows; every number that must be is finite."""
    files: dict[str, list[str]] = {}
    for name, rows in parts.items():
        for part, own in rows.items():
            files.setdefault(part, []).append(str(write_rows(folder / part / f"{name}.jsonl", own)))
    result = pf2lora.federate(**SETTINGS | settings | files)
    (run,) = result.methods["pf2lora"].runs
    for record in run.rounds:
        assert record.left_out == {}
        assert all(loss is not None and math.isfinite(loss) for loss in record.train_loss)
    assert all(score is not None for score in run.served[result.metric].per_client)
    return result


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("task", TASKS)
def test_a_client_of_few_rows_trains_where_nothing_has_to_be_split(
    task: Task, count: int, tmp_path: Path
) -> None:
    settings, rows = task(tmp_path)
    few = {"clients": rows[:count], "test": rows[count : count + 1], "validation": rows[-1:]}
    many = {"clients": rows[:6], "test": rows[6:8], "validation": rows[8:10]}
    result = trained(tmp_path, settings, {"few": few, "many": many})
    assert [(c.train, c.test, c.validation) for c in result.clients] == [(count, 1, 1), (6, 2, 2)]
    (run,) = result.methods["pf2lora"].runs
    told = [line for line in run.warnings if "far above" in line]
    assert len(told) == 1 and f"{count} training rows of client 'few'" in told[0]


@pytest.mark.parametrize("task", TASKS)
def test_a_client_of_few_rows_is_refused_where_they_have_to_be_split(task: Task, tmp_path: Path) -> None:
    settings, rows = task(tmp_path)
    files = [str(write_rows(tmp_path / "c" / f"{n}.jsonl", rows[:n])) for n in (8, 3)]
    with pytest.raises(UserError, match="client '3' has 3 rows; at least 4 are needed"):
        pf2lora.federate(**SETTINGS | settings, clients=files)
    files[1] = str(write_rows(tmp_path / "c" / "4.jsonl", rows[:4]))
    result = pf2lora.federate(**SETTINGS | settings, clients=files)
    assert [(c.train, c.test, c.validation) for c in result.clients][1] == (2, 1, 1)
    (run,) = result.methods["pf2lora"].runs
    assert all(loss is not None for record in run.rounds for loss in record.train_loss)


@pytest.mark.parametrize("task", TASKS)
def test_a_client_whose_rows_are_all_the_same_trains_and_is_told(task: Task, tmp_path: Path) -> None:
    settings, rows = task(tmp_path)
    result = trained(tmp_path, settings, {"same": {"clients": rows[:1] * 10}, "many": {"clients": rows[:10]}})
    (run,) = result.methods["pf2lora"].runs
    assert any("test rows of client 'same'" in line for line in run.warnings)


def test_a_client_of_one_label_trains_and_has_no_correlation(tmp_path: Path) -> None:
    settings, rows = classification(tmp_path)
    good = [row for row in rows if row["label"] == "pos"]
    result = trained(tmp_path, settings, {"good": {"clients": good}, "many": {"clients": rows}})
    (run,) = result.methods["pf2lora"].runs
    assert result.clients[0].labels == {"neg": 0, "pos": result.clients[0].train}
    assert run.served["matthews"].per_client[0] is None and run.served["accuracy"].per_client[0] is not None


def test_clients_of_one_label_alone_have_nothing_to_tell_apart(tmp_path: Path) -> None:
    settings, rows = classification(tmp_path)
    good = [row for row in rows if row["label"] == "pos"]
    with pytest.raises(UserError, match="only one label, 'pos', in all training rows"):
        trained(tmp_path, settings, {"a": {"clients": good}, "b": {"clients": good}})
