"""Ctrl-C and SIGTERM: the first asks a run to stop at the end of its round, the second stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ASKED = b"\npf2lora: stopping at the end of this round; once more stops at once\n"


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. The message says how it can go on, `code` is the command's exit code."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.code = 128 + number


class Interruption:
    """Whether somebody asked."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.number, self.quiet = 0, quiet  # the signal; 0: nobody

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals ask from here on, instead of stopping at once. Only the main thread may listen to them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.ask) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self.number:
            self.number = number
            raise KeyboardInterrupt
        self.number = number
        if not self.quiet:
            os.write(2, ASKED)  # print() may be what was interrupted
