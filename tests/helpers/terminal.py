"""A terminal to run a command in: what it wrote there, as somebody saw it, screen by screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(
    args: Sequence[object], width: int = 100, seconds: float = 120, **environment: str
) -> tuple[int, str]:
    """The command's exit code and all it wrote to a terminal of that width, escape sequences and all."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    command = [sys.executable, "-c", "from pf2lora.cli import main; main()", *map(str, args)]
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(width)} | environment
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    written, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        ready, _, _ = select.select([leader], [], [], 0.2)
        if ready:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # the last one has closed it
                break
            if not part:
                break
            written += part
    process.kill() if process.poll() is None and time.monotonic() >= until else None
    os.close(leader)
    return process.wait(), written.decode("utf8", "replace")


def plain(text: str) -> str:
    """Without what steers the terminal; what is drawn over something else is a line of its own."""
    return CONTROL.sub("", text.replace("\r\n", "\n")).replace("\r", "\n")
