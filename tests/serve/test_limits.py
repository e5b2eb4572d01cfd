"""Too much at once, too long, gone away, broken: who is told what, and that nobody else notices."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from serving import complete, serving, standing_still

from pf2lora.errors import UserError
from pf2lora.serve.answering import RowsJob
from pf2lora.serve.errors import ApiError, busy
from pf2lora.serve.worker import Worker, explained


def test_whoever_comes_when_the_line_is_full_is_told_to_come_back(generation_run: Path) -> None:
    with (
        serving(generation_run, batch=1, queue=2) as served,
        standing_still(served) as pause,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(complete, served, "north", "soup")
        assert pause.asked.wait(10)
        second = pool.submit(complete, served, "south", "soup")
        waiting = served.service.worker._waiting
        for _ in range(500):
            if len(waiting) == 2:
                break
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as error:
            complete(served, "west", "soup")
        assert error.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            served.client().completions.create(model="west", prompt=["a", "b", "c"])
        pause.go_on.set()
        assert first.result(20) and second.result(20)


def test_a_request_that_takes_too_long_is_ended(generation_run: Path) -> None:
    with serving(generation_run, seconds=0.3) as served, standing_still(served):
        with pytest.raises(openai.InternalServerError) as error:
            complete(served, "north", "soup")
        assert error.value.status_code == 504 and "not finished within 0.3 seconds" in str(error.value)
        with pytest.raises(openai.APIError, match="not finished within"):
            list(served.client().completions.create(model="north", prompt="soup", stream=True))
        assert all(job.cancelled for job in served.service.worker._waiting)


def test_whoever_goes_away_is_no_longer_written_for(generation_run: Path) -> None:
    with serving(generation_run) as served, standing_still(served) as pause:
        impatient = served.client().with_options(timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            impatient.completions.create(model="north", prompt="soup")
        assert pause.asked.is_set()
        for _ in range(500):
            if all(job.cancelled for job in served.service.worker._waiting):
                break
            time.sleep(0.01)
        assert [job.cancelled for job in served.service.worker._waiting] == [True]


def test_half_a_request_is_no_trouble(generation_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(generation_run) as served:
        host, _, port = served.address.removeprefix("http://").partition(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        for half in ("", head, f"{head}Content-Length: 100\r\n\r\n{{"):
            with socket.create_connection((host, int(port))) as caller:
                caller.sendall(half.encode())
        assert complete(served, "north", "soup")
    assert "Traceback" not in capfd.readouterr().err


def test_a_pass_that_fails_ends_its_requests_and_no_others(
    generation_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(generation_run) as served:
        batch = served.service.worker.batch  # type: ignore[union-attr]
        step, batch.step = batch.step, lambda: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError, match=r"the model failed \(ZeroDivisionError\)"):
            complete(served, "north", "soup")
        batch.step = step  # type: ignore[method-assign]
        assert complete(served, "north", "soup")
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_end_waits_for_a_text_and_tells_those_who_wait(generation_run: Path) -> None:
    with serving(generation_run) as served:
        worker = served.service.worker
        slow, turn = threading.Event(), worker.turn

        def slowly() -> None:
            slow.set()
            time.sleep(0.05)
            turn()

        worker.turn = slowly  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(complete, served, "north", "soup")
            assert slow.wait(10)
            assert worker.alive
    assert text.result(20) and not worker.alive


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory: 3 GiB of north's"), 503, "the device's memory is full"),
        (RuntimeError("CUDA error: out of memory"), 503, "the device's memory is full"),
        (UserError("a row that\ncannot be used"), 400, "a row that cannot be used"),
        (RuntimeError("secret words of a prompt"), 500, "the model failed (RuntimeError)"),
        (busy(), 429, "too many requests"),
    ],
)
def test_what_a_caller_is_told_of_an_error(error: Exception, status: int, words: str) -> None:
    told = explained(error)
    assert told.status == status and words in told.message
    assert "secret" not in told.message and "north" not in told.message and "\n" not in told.message


def test_nobody_fills_the_line_or_the_passes_alone() -> None:
    class Idle(Worker[RowsJob]):
        def turn(self) -> None:
            raise NotImplementedError

    def jobs(owner: str, count: int) -> list[RowsJob]:
        return [RowsJob("common", [], tell=lambda event: None, owner=owner) for _ in range(count)]

    worker = Idle(most_waiting=6, most_of_one=4)
    worker.submit(jobs("north", 4))
    with pytest.raises(ApiError, match="too many requests"):
        worker.submit(jobs("north", 1))
    worker.submit(jobs("south", 2))
    with pytest.raises(ApiError, match="too many requests"):
        worker.submit(jobs("west", 1))
    assert [job.owner for job in worker.take(3)] == ["north", "south", "north"]
    assert [job.owner for job in worker.take(9)] == ["south", "north", "north"]
