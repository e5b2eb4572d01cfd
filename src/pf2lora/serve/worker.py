"""The thread that holds the model: requests wait in one line, and those that wait together are run together."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from pf2lora.core.failures import ran_out
from pf2lora.engines.room import free_memory
from pf2lora.errors import UserError, one_line
from pf2lora.serve.errors import ApiError, bad_request, broken, busy, closing


class Job(Protocol):
    """Something asked of a model."""

    model: str
    owner: str  # who asks
    cancelled: bool

    def tell(self, event: Any, /) -> None:
        """Hear of results, or of what went wrong; called in the worker's thread."""


J = TypeVar("J", bound=Job)


class Worker(ABC, Generic[J]):
    """A line of jobs of at most `most_waiting`, of one owner `most_of_one`, and the thread that takes from it: whoever
    has the fewest running comes first. A turn that fails ends the jobs that were in it, and nobody else's, unless there
    can be no other turn."""

    def __init__(self, most_waiting: int, most_of_one: int | None = None) -> None:
        self.most_waiting, self.most_of_one = most_waiting, most_of_one or most_waiting
        self.running: list[J] = []
        self._waiting: list[J] = []
        self._changed = threading.Condition()
        self._over: ApiError | None = None  # why nothing more is done
        self._thread = threading.Thread(target=self._run, name="pf2lora-serve", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.running)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._over is None

    def submit(self, jobs: Sequence[J]) -> None:
        """Put jobs into the line, all of them or none."""
        with self._changed:
            if self._over is not None:
                raise self._over
            if len(jobs) > (most := min(self.most_waiting, self.most_of_one)):
                raise bad_request(f"{len(jobs)} at once, and at most {most} may wait (--queue)", "prompt")
            self._waiting = [job for job in self._waiting if not job.cancelled]
            same = sum(job.owner == jobs[0].owner for job in self._waiting)
            if len(self._waiting) + len(jobs) > self.most_waiting or same + len(jobs) > self.most_of_one:
                raise busy()
            self._waiting += jobs
            self._changed.notify()

    def close(self, wait: float = 10) -> None:
        """End after the turn that is being made; whoever still waits is told."""
        self._end(closing())
        if self._thread.is_alive():
            self._thread.join(wait)

    def _end(self, why: ApiError) -> None:
        with self._changed:
            self._over = self._over or why
            self._changed.notify()

    def take(self, most: int) -> list[J]:
        """Some of those who wait, in turn of their owners; they are running from now on."""
        running = Counter(job.owner for job in self.running)
        taken: list[J] = []
        with self._changed:
            self._waiting = [job for job in self._waiting if not job.cancelled]
            while self._waiting and len(taken) < most:
                job = min(self._waiting, key=lambda job: running[job.owner])  # the first of those
                self._waiting.remove(job)
                running[job.owner] += 1
                taken.append(job)
        self.running = [*self.running, *taken]
        return taken

    def done(self, jobs: Sequence[J]) -> None:
        self.running = [job for job in self.running if job not in jobs]

    @abstractmethod
    def turn(self) -> None:
        """Take jobs from the line and bring the running ones one pass further."""

    def reset(self) -> None:
        """Let go of everything, after a turn that failed; an error if there can be no other turn."""

    def _run(self) -> None:
        try:
            while self._next():
                try:
                    self.turn()
                except Exception as error:
                    self._fail(error)
        finally:
            self._end(broken())  # unless it was to end
            assert self._over is not None
            for job in (*self.running, *self._waiting):
                job.tell(self._over)

    def _next(self) -> bool:
        """Whether there is another turn to be made, once there is something to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._over is not None or not self.idle)
            return self._over is None

    def _fail(self, error: Exception) -> None:
        failed, self.running = self.running, []
        told = explained(error)
        if told.status == 500:
            traceback.print_exception(error)
        for job in failed:
            job.tell(told)
        self.reset()


def check_device(device: torch.device) -> None:
    """An error if the device computes nothing any more: after some errors CUDA does not, until the process ends."""
    torch.ones(1, device=device).sum().item()


def explained(error: Exception) -> ApiError:
    """What a caller is told of an error; the traceback of an unforeseen one stays at the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return bad_request(one_line(error))
    if ran_out(error):
        free_memory()
        return ApiError(503, "the device's memory is full; try again with less at once", code="out_of_memory")
    return ApiError(500, f"the model failed ({type(error).__name__})")
