"""How far long work has got: a live screen or a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pf2lora.errors import unknown
from pf2lora.run import numbers
from pf2lora.run.events import Listener
from pf2lora.run.plain_log import LINE_EVERY, JsonLog, Lines, to_stderr
from pf2lora.run.screen import Screen

LOGS = ("auto", "lines", "json", "none")


@contextmanager
def shown(
    log: str = "auto", on_note: Callable[[str], None] = to_stderr, *, silent: bool = False
) -> Iterator[Listener]:
    """Who shows a run while it goes on: `auto` is a live screen on a terminal and `lines` elsewhere, whose notes go to
    `on_note`; `json` writes every event to standard output; `none` shows nothing, as does whoever is `silent`."""
    if log not in LOGS:
        raise unknown("log", log, LOGS)
    if silent or log == "none":
        yield lambda event: None
    elif log == "auto" and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with Screen() as screen:
            yield screen
    elif log in ("auto", "lines"):
        yield Lines(on_note)
    else:
        yield JsonLog()


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
            to_stderr(f"{what}: {done}/{total}, {rate:.1f}/s, about {numbers.duration(round(left))} left")

    yield advance
