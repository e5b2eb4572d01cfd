"""Too much at once, too long, gone away, broken: who is told what, and that nobody else notices."""

from __future__ import annotations

import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from serving import Served, complete, serving, standing_still

from pf2lora.errors import UserError
from pf2lora.serve.answering import RowsJob
from pf2lora.serve.errors import ApiError, busy
from pf2lora.serve.service import Limits
from pf2lora.serve.worker import Worker, explained
from pf2lora.serve.writing import TextJob


@pytest.fixture(scope="module")
def impatient(generation_run: Path) -> Iterator[Served]:
    with serving(generation_run, silence=0.3) as running:
        yield running


def until(true: Callable[[], bool]) -> None:
    """Wait for it."""
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come true")


def test_whoever_comes_when_the_line_is_full_is_told_to_come_back(generation_run: Path) -> None:
    with (
        serving(generation_run, batch=1, queue=2) as served,
        standing_still(served) as pause,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(complete, served, "north", "soup")
        assert pause.asked.wait(10)
        second = pool.submit(complete, served, "south", "soup")
        until(lambda: len(served.service.worker._waiting) == 2)
        with pytest.raises(openai.RateLimitError) as error:
            complete(served, "west", "soup")
        assert error.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="3 at once, and at most 2 may wait"):  # nor later
            served.client().completions.create(model="west", prompt=["a", "b", "c"])
        pause.go_on.set()
        assert first.result(20) and second.result(20)


def health(served: Served) -> int:
    try:
        with urllib.request.urlopen(f"{served.address}/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_too_many_requests_are_told_so_and_health_beside_them(
    generation_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limits, "requests", 1)
    with (
        serving(generation_run) as served,
        standing_still(served) as pause,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(complete, served, "north", "soup")
        assert pause.asked.wait(10)
        with pytest.raises(openai.InternalServerError) as error:
            complete(served, "south", "soup")
        assert (error.value.status_code, error.value.code) == (503, "overloaded")
        assert error.value.response.headers["retry-after"] == "1"
        assert health(served) == 200
        pause.go_on.set()
        assert first.result(20) and complete(served, "south", "soup")


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
        until(lambda: all(job.cancelled for job in served.service.worker._waiting))
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


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def closed_after(sent: list[str], address: str, pause: float) -> float:
    """Seconds until the server closes a connection, on which it gets these pieces and then no more."""
    host, _, port = address.removeprefix("http://").partition(":")
    begun = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=10) as caller, suppress(ConnectionError):
        for piece in sent:
            caller.sendall(piece.encode())
            time.sleep(pause)
        while caller.recv(4096):
            pass
    return time.monotonic() - begun


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [HEAD],
        [*HEAD[:8]],  # letter by letter
        [f"{HEAD}Content-Length: 100\r\n\r\n{{"],
        ["GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", HEAD],  # the second on a connection
        [
            "GET /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
            *"a" * 8,
        ],  # answered already
    ],
)
def test_who_keeps_silent_is_hung_up_on(impatient: Served, sent: list[str]) -> None:
    assert 0.3 < closed_after(sent, impatient.address, 0.1) < 3


def test_who_sends_slowly_is_heard(impatient: Served) -> None:
    """Longer in all than one may be silent; a head and an answer take as long as they do."""
    body = '{"model": "north", "prompt": "soup"}'
    host, _, port = impatient.address.removeprefix("http://").partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as caller,
        standing_still(impatient) as pause,
    ):
        caller.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), 6):
            caller.sendall(body[start : start + 6].encode())
            time.sleep(0.1)
        assert pause.asked.wait(10)
        time.sleep(0.5)
        pause.go_on.set()
        assert caller.recv(4096).startswith(b"HTTP/1.1 200")


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


def test_a_broken_adapter_ends_its_own_texts_alone(generation_run: Path) -> None:
    with serving(generation_run) as served, ThreadPoolExecutor(3) as pool:
        wanted = [complete(served, name, "soup") for name in ("south", "west")]
        adapters = served.service.adapters
        adapters["north"] = (adapters["north"][0] * torch.nan, adapters["north"][1])
        with standing_still(served) as pause:
            sound = [pool.submit(complete, served, name, "soup") for name in ("south", "west")]
            broken = pool.submit(complete, served, "north", "soup")
            until(lambda: len(served.service.worker._waiting) == 3)
            pause.go_on.set()
            with pytest.raises(openai.InternalServerError, match="'north' computes no numbers"):
                broken.result(20)
            assert [text.result(20) for text in sound] == wanted


def test_a_device_that_computes_no_more_ends_the_worker(
    generation_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After some errors of CUDA's every further pass fails: whoever watches over the process shall know."""
    monkeypatch.setattr("pf2lora.serve.writing.check_device", lambda device: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda given: print(given.exc_type, file=sys.stderr))
    with (
        serving(generation_run, batch=1) as served,
        standing_still(served) as pause,
        ThreadPoolExecutor(2) as pool,
    ):
        served.service.worker.batch.step = lambda: 1 / 0  # type: ignore[union-attr, method-assign]
        first = pool.submit(complete, served, "north", "soup")
        assert pause.asked.wait(10)
        second = pool.submit(complete, served, "north", "soup")
        until(lambda: len(served.service.worker._waiting) == 2)
        assert health(served) == 200
        pause.go_on.set()
        with pytest.raises(openai.InternalServerError, match=r"the model failed \(ZeroDivisionError\)"):
            first.result(20)
        with pytest.raises(openai.InternalServerError, match="must be started again"):
            second.result(20)  # which only waited
        with pytest.raises(openai.InternalServerError, match="must be started again") as error:
            complete(served, "north", "soup")
        assert (error.value.status_code, error.value.code) == (503, "failed") and health(served) == 503
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_in_the_middle_makes_room(generation_run: Path, stream: bool) -> None:
    with serving(generation_run, batch=1) as served:
        worker = served.service.worker
        turn = worker.turn
        jobs: list[TextJob] = []

        def slowly() -> None:
            turn()
            jobs.extend(job for job in worker.running if job not in jobs)  # type: ignore[misc]
            time.sleep(0.05)

        worker.turn = slowly  # type: ignore[method-assign]
        asked: dict[str, Any] = {"model": "base", "prompt": "soup", "max_tokens": 110, "temperature": 2}
        if stream:
            with served.client().completions.create(**asked, stream=True) as pieces:
                next(iter(pieces))
        else:
            with pytest.raises(openai.APITimeoutError):
                served.client().with_options(timeout=0.3).completions.create(**asked)
        until(lambda: not worker.running)
        assert len(jobs) == 1 and jobs[0].cancelled and 0 < jobs[0].written < 60
        worker.turn = turn  # type: ignore[method-assign]
        assert complete(served, "north", "soup")


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
