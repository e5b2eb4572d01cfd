"""How far long work has got: a bar with rate and ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY = 15.0  # seconds between plain lines


@contextmanager
def track(total: int, what: str) -> Iterator[Callable[..., None]]:
    """Yields `advance(n=1)`. Goes to standard error, so that a command's output stays its output."""
    with (_bar if sys.stderr.isatty() else _lines)(total, what) as advance:
        yield advance


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "", style="dim")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda n=1: progress.advance(bar, n)


@contextmanager
def _lines(total: int, what: str) -> Iterator[Callable[..., None]]:
    started = last = time.monotonic()
    done = 0

    def advance(n: int = 1) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= LINE_EVERY and done < total:
            last = now
            rate = done / (now - started)
            left = (total - done) / rate
            print(
                f"{what}: {done}/{total}, {rate:.1f}/s, about {left:.0f} s left", file=sys.stderr, flush=True
            )

    yield advance
