"""Passes of answers that are recorded when they come again: the same numbers, on a device and on what stands in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import make_world
from tiny_tasks import write_question_task
from torch import Tensor

from pf2lora import federate
from pf2lora.engines.batches import Batch
from pf2lora.engines.recorded_answers import RecordedAnswers
from pf2lora.engines.room import Room
from pf2lora.run import comparison
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.fitting import fitted, record_answers
from pf2lora.run.set_up import set_up
from pf2lora.run.validation import judge

OF_TASK: dict[str, dict[str, Any]] = {
    "classification": {"max_length": 16},
    "question-answering": {"max_length": 64, "stride": 8},
}
CUDA = torch.cuda.is_available()
calls: list[bool] = []  # of the function that is recorded: whether while something is


class StandIn:
    """A graph without CUDA: a replay computes the function again, from the places and into the answers it had."""

    recording: StandIn | None = None

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        inputs, answers = self.held
        for place, new in zip(answers, double(*inputs)):
            place.copy_(new)

    held: Any = None


def double(x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    rows = batch.tensors["rows"]
    return 2 * x.sum() + rows, y.sum() * rows


def asked(x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    calls.append(StandIn.recording is not None)
    found = double(x, y, batch)
    if StandIn.recording is not None:
        StandIn.recording.held = ((x, y, batch), found)
    return found


def write_task(task: str, folder: Path) -> tuple[Path, list[Path]]:
    """A tiny model in a folder, and three clients' files."""
    world = make_world(folder)
    return (world.model, world.clients) if task == "classification" else write_question_task(folder, "abc")


def rows(*values: float) -> Batch:
    return Batch(1, {"rows": torch.tensor(values)})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def record(graph: StandIn, pool: None) -> Iterator[None]:
        StandIn.recording = graph
        try:
            yield
        finally:
            StandIn.recording = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph", record)
    calls.clear()


@pytest.mark.usefixtures("stand_in")
def test_a_shape_is_recorded_when_it_comes_again_and_answers_are_the_callers_own() -> None:
    recorder = RecordedAnswers()
    x, y = torch.ones(1, 3), torch.full((1, 2), 2.0)
    found = [recorder("losses", asked, k * x, y, rows(k, 1)) for k in range(4)]
    for k, answers in enumerate(found):  # what a later replay wrote does not show in an earlier answer
        expected = double(k * x, y, rows(k, 1))
        assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True))
    assert calls == [False, True]  # plain, recorded; then replayed alone
    recorder("losses", asked, x, y, rows(1, 2, 3))
    recorder("scores", asked, x, y, rows(1, 2))
    assert calls == [False, True, False, False] and len(recorder.recordings) == 1


@pytest.mark.usefixtures("stand_in")
def test_memory_that_is_asked_for_is_given_back_for_good() -> None:
    room, recorder = Room(), RecordedAnswers()
    room.holders.add(recorder)
    x, y = torch.ones(1, 3), torch.ones(1, 2)
    for _ in range(3):
        recorder("losses", asked, x, y, rows(1))
    assert room.give_back() and not room.give_back()
    assert recorder("losses", asked, x, y, rows(5))[0].tolist() == [2 * 3 + 5]
    assert calls == [False, True, False] and not recorder.recordings


def test_what_cannot_be_recorded_is_computed_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def fails(graph: Any, pool: None) -> Iterator[None]:
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph", fails)
    recorder = RecordedAnswers()
    x, y = torch.ones(1, 3), torch.ones(1, 2)
    found = [recorder("losses", double, x, y, rows(1)) for _ in range(4)]
    assert all(torch.equal(f[0], found[0][0]) for f in found)
    assert caplog.text.count("answers are computed without a CUDA graph") == 1


def test_only_where_a_pass_leaves_most_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the base model; not where graphs are off."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    workload = prepare(from_settings(make_world(tmp_path).settings(), "test"))
    off = replace(workload.config, model=replace(workload.config.model, graphs=False))
    for config, memory, expected in (
        (workload.config, 40, True),
        (workload.config, 20, False),
        (off, 40, False),
    ):
        trial = set_up(replace(workload, config=config), "homlora", 0)
        trial.model.remove()
        record_answers(trial, lambda trial, clients: 1000 + 10 * clients, memory)
        assert (trial.workload.task.rooms.answering.recorder is not None) == expected


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("task", ["classification", "question-answering"])
def test_a_run_with_recorded_answers_has_the_plain_ones_numbers(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluation, size and choice of it."""
    model, files = write_task(task, tmp_path)
    about = OF_TASK[task] | {
        "task": task,
        "device": "cpu",
        "validation_ratio": 0.3,
        "method": ["pf2lora"],
        "lr": 0.006,
    }
    settings = about | {
        "model": str(model),
        "clients": [str(f) for f in files],
        "rounds": 3,
        "evaluate_every": 1,
    }
    plain = federate(**settings)
    record, made = RecordedAnswers.record, list[RecordedAnswers]()

    def held(self: RecordedAnswers, function: Any, *inputs: Any) -> Any:
        found = record(self, function, *inputs)
        found.graph.held = (function, (*found.models, found.batch), found.answers)  # type: ignore[attr-defined]
        return found

    def replay(graph: StandIn) -> None:
        function, inputs, answers = graph.held
        for place, new in zip(answers, function(*inputs)):
            place.copy_(new)

    def fitted(trial: Any) -> Any:
        made.append(RecordedAnswers())
        trial.workload.task.rooms.answering.recorder = made[-1]
        return trial, ""

    monkeypatch.setattr(RecordedAnswers, "record", held)
    monkeypatch.setattr(StandIn, "replay", replay)
    monkeypatch.setattr(comparison, "fitted", fitted)
    recorded = federate(**settings)
    (first,), (second,) = (found.methods["pf2lora"].runs for found in (plain, recorded))
    assert made[0].recordings and not made[0].plain
    for point in ("served", "before_averaging", "deploy"):
        assert getattr(first, point) == getattr(second, point)
    assert first.choices == second.choices


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("task", ["classification", "question-answering"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_on_a_device_replayed_answers_are_the_plain_ones(task: str, precision: str, tmp_path: Path) -> None:
    model, files = write_task(task, tmp_path)
    about = OF_TASK[task] | {"task": task, "precision": precision, "device": "cuda", "validation_ratio": 0.3}
    settings = {"model": str(model), "clients": [str(file) for file in files], "rounds": 1} | about
    workload = prepare(from_settings(settings, "test"))
    trial, _ = fitted(set_up(workload, "pf2lora", 0))
    rooms = trial.workload.task.rooms
    assert rooms.answering.recorder is not None
    ask = judge(trial, range(len(workload.clients)), workload.validation)
    torch.manual_seed(0)
    states = [
        tuple(0.1 * torch.randn_like(t, device="cuda") for t in (trial.state.x, trial.state.y))
        for _ in range(3)
    ]
    replayed = [[ask(*state) for state in states] for _ in range(2)]
    assert rooms.answering.recorder.recordings  # type: ignore[attr-defined]
    rooms.answering.recorder = None
    plain = [ask(*state) for state in states]
    for found in replayed:
        for a, b in zip(found, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert not torch.allclose(plain[0], plain[1], equal_nan=True)
    trial.model.remove()
