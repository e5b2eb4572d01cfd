"""One live screen while a run goes on, on a terminal: which method, how far, how long yet, how good so far."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from pf2lora.errors import one_line
from pf2lora.run import numbers
from pf2lora.run.events import Event, Note, RunEnded, RunStarted
from pf2lora.run.status import Finished, Status, left

LAST = 5  # finished methods that are shown
BAR = 24  # characters


class Screen:
    """Listens, and draws below whatever else is written, on standard error."""

    def __init__(self) -> None:
        import sys

        from rich.console import Console
        from rich.live import Live

        self.status = Status()
        self.console = Console(stderr=True, highlight=False)
        self.live = Live(
            console=self.console,
            get_renderable=self.drawn,
            refresh_per_second=4,  # so that times go on while nothing else does
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what goes into a file stays what goes into the file
        )
        self.drawing = False

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self.drawing:
            self.drawing = False
            self.live.stop()

    def __call__(self, event: Event) -> None:
        self.status.take(event)
        if isinstance(event, Note):
            self.console.print(one_line(event.line), markup=False, soft_wrap=True)
        elif isinstance(event, RunStarted) and not self.drawing:
            self.drawing = True
            self.live.start()
        elif isinstance(event, RunEnded):
            self.stop()

    def drawn(self) -> Any:
        """What is on the screen now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self.status
        if now.run is None:
            return Text("")
        if not now.method:
            return Text(f"{now.which}: {now.where}", style="bold", no_wrap=True, overflow="ellipsis")
        bars = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(5):
            bars.add_column(no_wrap=True, overflow="ellipsis")
        lines: list[Any] = []
        several = len(now.run.methods) > 1
        shares = [(now.label if several else "", now.share, now.rate, now.seconds_left)]
        if several:
            shares.append(("all methods", now.share_of_all, "", now.seconds_left_of_all))
        for what, share, rate, seconds in shares:
            bar = ProgressBar(total=1.0, completed=share, width=BAR)
            bars.add_row(*([one_line(what)] if several else []), bar, f"{share:4.0%}", left(seconds), rate)
        lines.append(
            Text(f"{one_line(now.which)}: {now.where}", style="bold", no_wrap=True, overflow="ellipsis")
        )
        lines.append(bars)
        found = self.found()
        if found:
            lines.append(Text(found, no_wrap=True, overflow="ellipsis"))
        for method in now.finished[-LAST:]:
            lines.append(Text(finished_line(method), style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def found(self) -> str:
        """`loss 0.412 · accuracy 81.30 after round 10 · worst client: west 70.10`."""
        now, parts = self.status, []
        if now.loss is not None:
            parts.append(f"loss {now.loss:.3f}")
        if now.scores is not None:
            parts.append(f"{now.scores.text} after round {now.scores.round}")
            parts.append(f"worst client: {one_line(now.scores.worst_text)}")
        return " · ".join(parts)


def finished_line(method: Finished) -> str:
    """`HOMLoRA: accuracy 79.20 as served, worst client: south 71.00, in 1 min 50 s`."""
    parts = [f"failed: {method.failed}"] if method.failed else []
    if method.scores is not None and not method.failed:
        parts += [f"{method.scores.text} as served", f"worst client: {method.scores.worst_text}"]
    if method.seconds:
        parts.append(f"in {numbers.duration(round(method.seconds))}")
    return one_line(f"{method.label}: {', '.join(parts) or 'done before'}")
