"""`/v1/predict`: labels and answers of runs that write no texts, what waits together in the same passes."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from little_world import FAST, make_world, opened
from serving import Served, serving
from tiny_tasks import write_question_task

import pf2lora
from pf2lora.errors import UserError
from pf2lora.serve.answering import Answerer, RowsJob, rows_of
from pf2lora.serve.errors import ApiError
from pf2lora.serve.models import served_models

TEXTS = ["the film was superb", "a tedious plot", "the actor and the music"]


@pytest.fixture(scope="module")
def labels_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = make_world(tmp_path_factory.mktemp("labels"))
    pf2lora.federate(**world.settings(out=world.root / "run", client_lr=3.0, lr=0.03))
    return world.root / "run"


@pytest.fixture(scope="module")
def served(labels_run: Path) -> Iterator[Served]:
    with serving(labels_run, rows=8) as running:
        yield running


def post(served: Served, path: str, body: object) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{served.address}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


@pytest.mark.parametrize("client", ["north", "south", "west", "common"])
def test_labels_are_those_of_predict(served: Served, labels_run: Path, client: str) -> None:
    loaded = opened(labels_run)
    rows = rows_of(loaded, list(TEXTS))
    answers = loaded.answers(None if client == "common" else client, rows)
    wanted = [loaded.task.answer(answer, row) for answer, row in zip(answers, rows)]
    status, found = post(served, "/v1/predict", {"model": client, "inputs": TEXTS})
    assert status == 200 and found["model"] == client
    for one, other in zip(found["data"], wanted, strict=True):
        assert one["predicted"] == other["predicted"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-6)
    objects = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    again = post(served, "/v1/predict", {"model": client, "inputs": objects})[1]["data"]
    assert [one["predicted"] for one in again] == [one["predicted"] for one in found["data"]]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "north", "inputs": []}, 400, "one or more texts"),
        ({"model": "north", "inputs": "superb"}, 400, "one or more texts"),
        ({"model": "north", "inputs": [3]}, 400, "one or more texts"),
        ({"model": "north", "inputs": [" "]}, 400, "empty text"),
        ({"model": "north", "inputs": [{"words": "superb"}]}, 400, "inputs"),
        ({"model": "north", "inputs": [{"text": 3}]}, 400, "inputs, row 1: column 'text' holds 3"),
        ({"model": "north", "inputs": ["a"] * 9}, 400, "9 inputs, and a request may have 8"),
        ({"model": "base", "inputs": ["a"]}, 404, "no model 'base'"),  # a new head would know nothing
        ({"inputs": ["a"]}, 400, "model is missing"),
    ],
)
def test_bad_inputs(served: Served, body: object, status: int, words: str) -> None:
    found, message = post(served, "/v1/predict", body)
    assert found == status and words in message, message


def test_a_run_of_labels_writes_no_texts(served: Served) -> None:
    for path, asked in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        status, message = post(served, f"/v1/{path}", {"model": "north"} | asked)
        assert status == 400 and "POST /v1/predict" in message


def test_jobs_that_wait_together_share_their_passes(labels_run: Path) -> None:
    loaded = opened(labels_run)
    passes: list[int] = []
    loaded.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    answerer = Answerer(loaded, served_models(loaded), size=16, most_waiting=16)
    told: dict[int, Any] = {}

    def job(i: int, model: str, texts: list[str]) -> RowsJob:
        return RowsJob(model, rows_of(loaded, list(texts)), tell=lambda event: told.update({i: event}))

    asked = [("north", TEXTS[:1]), ("west", TEXTS[:2]), ("north", TEXTS[1:]), ("common", TEXTS[2:])]
    answerer.submit([job(i, *one) for i, one in enumerate(asked)])
    answerer.turn()
    assert len(passes) == 1 and answerer.idle
    together = dict(told)
    for i, one in enumerate(asked):
        answerer.submit([job(i, *one)])
        answerer.turn()
        assert [a["predicted"] for a in told[i]] == [a["predicted"] for a in together[i]]
        assert [a["probability"] for a in told[i]] == pytest.approx([a["probability"] for a in together[i]])
    assert len(passes) == 5


def test_rows_that_cannot_be_used_spoil_nobody_elses(
    labels_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = opened(labels_run)
    encode = loaded.task.encode

    def picky(clients: Any, *, training: bool) -> Any:
        if any("tedious" in row.text for rows in clients for row in rows):
            raise UserError("no tedious texts")
        return encode(clients, training=training)

    monkeypatch.setattr(loaded.task, "encode", picky)
    answerer = Answerer(loaded, served_models(loaded), size=16, most_waiting=16)
    told: dict[int, Any] = {}
    for i, text in enumerate(TEXTS):
        tell = partial(told.__setitem__, i)
        answerer.submit([RowsJob("north", rows_of(loaded, [text]), tell=tell)])
    answerer.turn()
    assert len(told[0]) == len(told[2]) == 1
    assert isinstance(told[1], ApiError) and told[1].status == 400 and "no tedious texts" in told[1].message


def test_what_is_not_in_the_folder_is_not_served(labels_run: Path, tmp_path: Path) -> None:
    """A federation's lead has the common adapter, and nobody's own."""
    run = Path(shutil.copytree(labels_run, tmp_path / "run"))
    (run / "state" / "clients" / "south.safetensors").unlink()
    assert list(served_models(opened(run))) == ["common", "north", "west"]
    shutil.rmtree(run / "state" / "clients")
    assert list(served_models(opened(run))) == ["common"]
    (run / "state" / "common.safetensors").unlink()
    with pytest.raises(UserError, match="no adapter in it to be served"):
        served_models(opened(run))


def test_questions_are_answered(tmp_path: Path) -> None:
    model, files = write_question_task(tmp_path, ["north", "south"])
    settings: dict[str, Any] = FAST | {"max_length": 48, "stride": 16, "task": "question-answering"}
    clients = [str(file) for file in files]
    pf2lora.federate(model=str(model), clients=clients, out=tmp_path / "run", **settings)
    asked = "where is the key ?\tsalt stone river cloud"
    context = {"question": "where is the key ?", "context": "salt stone river cloud"}
    with serving(tmp_path / "run") as running:
        status, found = post(running, "/v1/predict", {"model": "south", "inputs": [asked, context]})
        assert status == 200 and found["data"][0] == found["data"][1]
        assert set(found["data"][0]) == {"predicted", "no_answer_probability"}
        status, message = post(running, "/v1/predict", {"model": "south", "inputs": ["where ?"]})
        assert status == 400 and "a question needs its context" in message
