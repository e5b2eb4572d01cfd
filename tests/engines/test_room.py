"""Out of memory: half of the clients at a time, one line that says so, and the numbers of a run that had the room."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import build, tiny_problem
from torch import Tensor

from pf2lora.core.failures import ran_out
from pf2lora.engines.local import Schedule, home_of, train
from pf2lora.engines.room import NoRoom, Room
from pf2lora.engines.stepper import GraphStepper
from pf2lora.engines.steps import Step
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA


def bounded(F: Callable[..., Tensor], most: int, after: int = 0) -> Callable[..., Tensor]:
    """A loss on a device with memory for so many clients, once it was asked `after` times."""
    asked = 0

    def loss(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        nonlocal asked
        asked += 1
        if asked > after and batch.clients > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return F(x, y, batch)

    return loss


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("setting", ["pf2lora-difference", "homlora", "per-fedavg"])
def test_a_run_goes_on_with_fewer_clients_a_pass(
    setting: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From the first step, or in the middle of a round: its first steps are done again, and counted once."""
    p = tiny_problem("roberta", sizes=(5, 9, 2, 6, 4))
    method = build(setting, p)
    ends, counts = [], []
    for F, per_pass in ((p.F, 1), (bounded(p.F, 1, after), None)):
        done: dict[Any, int] = {}

        def count(step: Step, done: dict[Any, int] = done) -> None:
            done[step.lengths] = done.get(step.lengths, 0) + step.clients

        schedule = Schedule(2, 3, clients_per_pass=per_pass)
        rounds = [
            r.kept() for r in train(method, F, method.init(p.x, p.y), p.source, schedule, on_step=count)
        ]
        ends.append(rounds)
        counts.append(sum(done.values()))
    for ours, expected in zip(*reversed(ends)):
        torch.testing.assert_close(ours.served.x, expected.served.x, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.stats.loss, expected.stats.loss, rtol=0, atol=1e-9)
    assert counts == [2 * 3 * 5] * 2
    lines = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert lines == [
        "out of memory with 5 clients in a pass: from here on 2 at a time, with the same numbers",
        "out of memory with 2 clients in a pass: from here on 1 at a time, with the same numbers",
    ]


def test_no_room_for_one_client_is_an_error_that_says_what_helps() -> None:
    p = tiny_problem("bert")
    method = HomLoRA(p.layout)
    with pytest.raises(UserError, match="--checkpointing on, --micro-batch 1, --quantization nf4"):
        list(train(method, bounded(p.F, 0), method.init(p.x, p.y), p.source, Schedule(1, 1)))


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (MemoryError(), True),
        (RuntimeError("something else\nafter which nothing was out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_has_ended_in_many_words(error: Exception, memory: bool) -> None:
    """One recogniser for a pass that is halved, for a recording that is broken off, and for a run's last line."""
    assert ran_out(error) is memory
    calls: list[list[int]] = []

    def run(clients: list[int]) -> int:
        calls.append(clients)
        if len(clients) > 1:
            raise error
        return clients[0]

    if not memory:
        with pytest.raises(type(error)):
            list(Room(2).passes([3, 4], run))
        return
    assert [found for _, found in Room(2).passes([3, 4], run)] == [3, 4] and calls == [[3, 4], [3], [4]]


def test_a_single_clients_rows_are_halved_and_then_there_is_no_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room, tried = Room(rows=5), list[int | None]()

    def run(clients: list[int]) -> None:
        tried.append(room.rows)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(NoRoom):
        list(room.passes([7], run))
    assert tried == [5, 2, 1]
    assert [r.getMessage() for r in caplog.records] == [
        "out of memory with 5 rows of a client in a pass: from here on 2 at a time, with the same numbers",
        "out of memory with 2 rows of a client in a pass: from here on 1 at a time, with the same numbers",
    ]


def test_where_clients_are_at_home() -> None:
    """Of a thousand clients of whom ten take part there may be room for the ten alone."""
    cuda, host = torch.device("cuda"), torch.device("cpu")
    homes = [home_of(1000, Room(clients), cuda) for clients in (None, 1000, 999, 10)]
    assert homes == [cuda, cuda, host, host]


def test_other_errors_pass() -> None:
    def run(clients: list[int]) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        list(Room(2).passes([1, 2], run))


@pytest.mark.parametrize(
    "line",
    ["CUDA out of memory.", "CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"],
)
def test_a_recording_that_ran_out_is_no_reason_to_record_no_more(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a recording that is broken off may hide that of memory."""
    p = tiny_problem("bert")
    method = HomLoRA(p.layout)

    def record(*_: Any) -> Any:
        try:
            raise RuntimeError(line)
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    stepper = GraphStepper(p.F)
    monkeypatch.setattr(GraphStepper, "record", record)
    batch = p.source.draw([0, 1, 2], [0] * 3)
    with pytest.raises(RuntimeError) as raised:
        stepper(method, method.init(p.x, p.y), [batch])
    assert ran_out(raised.value) and not stepper.plain
    assert not ran_out(RuntimeError("another"))


def test_recordings_are_given_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stepper = GraphStepper(lambda x, y, b: x.sum(1))
    stepper.recordings["a"] = None  # type: ignore[assignment]
    calls: list[list[int]] = []

    def run(clients: list[int]) -> int:
        calls.append(clients)
        if len(clients) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sum(clients)

    room = Room(3)
    room.holders.add(stepper)
    found = list(room.passes([4, 5, 6], run))
    assert found == [([4], 4), ([5], 5), ([6], 6)] and calls == [[4, 5, 6], [4], [5], [6]]
    assert room.clients == 1 and not stepper.recordings
