"""Runs that are broken off, to be compared byte by byte with unbroken ones: clocks stand still, all else must agree.

`python broken_runs.py pf2lora's arguments` is `pf2lora` with clocks that stand still.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from little_world import World

import pf2lora
from pf2lora import cli
from pf2lora.core.method import Loss, Method, State
from pf2lora.engines import local, stopwatch
from pf2lora.engines.batches import Batch
from pf2lora.run import comparison, costs, folder, trial

CLOCK_FIELDS = ("created", "seconds", "evaluation_seconds", "resize_seconds", "peak_memory_bytes")
"""All that may differ in result.json after an interruption; in metrics.jsonl it is `time` and `seconds`."""

COMPARISON: dict[str, Any] = {
    "rounds": 4,
    "steps": 1,
    "evaluate_every": 2,
    "validation_ratio": 0.2,
    "checkpoint_every": 1,
    "method": ["local", "pf2lora"],
    "head": "personal",
}
"""What the fixture `broken` is a run of."""


class Killed(BaseException):
    """What nothing catches."""


def size_of_step(method: Method, F: Loss, state: State, batches: Sequence[Batch]) -> float:
    """In place of a step's operations, which take as long to count as a tiny run to train: as large as its batches."""
    return float(sum(tensor.numel() for batch in batches for tensor in batch.tensors.values()))


@contextmanager
def clocks_standing_still() -> Iterator[None]:
    """Every time and memory that a run writes down is the same each time, and a step's operations are not counted."""
    still = SimpleNamespace(perf_counter=lambda: 0.0, time=lambda: 0.0)
    noon = SimpleNamespace(now=lambda zone: datetime(2026, 1, 1, 12, tzinfo=UTC))
    with ExitStack() as stack:
        for module in (local, stopwatch, trial, folder):
            stack.enter_context(patch.object(module, "time", still))
        stack.enter_context(patch.object(comparison, "datetime", noon))
        stack.enter_context(patch.object(costs, "peak_memory", lambda device: 1))
        stack.enter_context(patch.object(costs, "flops_of_step", size_of_step))
        yield


@contextmanager
def killed_at(
    call: int, owner: Any = folder, name: str = "append_metrics", *, after: bool = True
) -> Iterator[None]:
    """The n-th call of a function is the last thing that happens."""
    original, count = getattr(owner, name), 0

    def counted(*args: Any, **rest: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            raise Killed
        found = original(*args, **rest)
        if count == call:
            raise Killed
        return found

    with patch.object(owner, name, counted):
        yield


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def unbroken(out: Path, settings: dict[str, Any]) -> dict[str, bytes]:
    """The files of a run that nothing happens to; `out` is free again."""
    pf2lora.federate(**settings, out=out)
    found = contents(out)
    out.rename(out.with_name("unbroken"))
    return found


def same(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name in expected if found[name] != expected[name]]
    assert differing == []


def go_on(world: World, out: Path, **changes: Any) -> Any:
    """`broken`, from its last checkpoint."""
    return pf2lora.federate(**world.settings(**COMPARISON | changes, out=out), resume=True)


def in_child(work: Callable[[], Any]) -> int:
    """The exit status of `work` in a process of its own: minus the signal that ended it, 0 where it ended well."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


DISK = ("fsync", "rename", "replace", "unlink", "mkdir", "truncate", "rmdir")


@contextmanager
def dying_at(call: int) -> Iterator[list[int]]:
    """SIGKILL just before the n-th time that something is done to the disk (0: never); yields the count."""
    count = [0]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **rest: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **rest)

        return counted

    with ExitStack() as stack:
        for name in DISK:
            stack.enter_context(patch.object(os, name, counting(getattr(os, name))))
        yield count


if __name__ == "__main__":
    with clocks_standing_still():
        cli.main()
