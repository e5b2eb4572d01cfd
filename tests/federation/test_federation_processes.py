"""Processes that end with whoever started them, and `leave`, which ends them from elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

import psutil

from pf2lora.errors import UserError
from pf2lora.federation.flare import processes
from pf2lora.federation.kit import Kit

FAMILY = """
import subprocess, sys, time
inner = "from pf2lora.federation.flare.child import end_with; import os, time; end_with(os.getppid()); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_process_ends_with_its_parent_even_if_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child, 2.0)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(child)


def sleeping(kit: Kit) -> list[str]:
    """A participant that does nothing."""
    return [sys.executable, "-c", "import time; time.sleep(60)", str(kit.folder)]


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    monkeypatch.setattr(processes, "command", sleeping)
    monkeypatch.setattr(processes, "check_port", lambda kit: None)
    return Kit(tmp_path, "server", server=True)


def test_leave_ends_what_runs_from_a_kit(kit: Kit) -> None:
    with pytest.raises(UserError, match="server is not running from"):
        processes.leave(kit)
    process = processes.start(kit)
    with pytest.raises(UserError, match="running already"):
        processes.start(kit)
    processes.leave(kit)  # the failed second start has not made it forget whom to end
    assert process.wait(timeout=5) is not None
    with pytest.raises(UserError, match="server is not running from"):
        processes.leave(kit)


def test_leave_ends_nobody_else(kit: Kit) -> None:
    process = processes.start(kit)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (kit.folder / "lock").write_text(str(other.pid))
    with pytest.raises(UserError, match="not on this machine or not as this user"):
        processes.leave(kit)
    assert other.poll() is None
    for each in (process, other):
        each.kill()
        each.wait()


def test_a_participant_is_started_with_the_engines_settings(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else memory grows with every round, and a job's end waits for a site that is gone."""
    print_it = (
        "import os; print(*(os.environ.get(key) for key in ('MALLOC_ARENA_MAX', 'MALLOC_MMAP_THRESHOLD_',"
    )
    print_it += " 'MALLOC_TRIM_THRESHOLD_', 'NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT', 'MINE')))"
    monkeypatch.setattr(processes, "command", lambda kit: [sys.executable, "-c", print_it])
    with tempfile.TemporaryFile() as log:
        processes.start(kit, log, {"MINE": "1"}).wait()
        log.seek(0)
        assert log.read().split() == [b"2", b"8388608", b"67108864", b"5", b"1"]
