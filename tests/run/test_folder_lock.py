"""Two runs in one folder at once: the second is refused, by a lock that a dead process does not leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from little_world import World, command_line, make_world, sentences, write_jsonl

import pf2lora
from pf2lora.errors import UserError
from pf2lora.folder_lock import Busy, acquire, check_unused, locked
from pf2lora.run.onboarding import onboard
from pf2lora.run.saved import load_run

HOLD = """
import sys, time
from pathlib import Path
from pf2lora.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that has the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_folder_is_one_process_s_until_it_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = holder(folder)
    try:
        for try_it in (check_unused, acquire):
            with pytest.raises(Busy, match=r"another process is writing into .*run'"):
                try_it(folder)
        moved = folder.rename(tmp_path / "moved")
        with pytest.raises(Busy):
            check_unused(moved)
        folder.mkdir()
        check_unused(folder)  # another folder, whatever it is called
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with locked(moved), pytest.raises(Busy):
        check_unused(moved)
    check_unused(moved)
    assert list(moved.iterdir()) == []  # nothing is left behind


def test_a_second_run_into_the_same_folder_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "run"
    process = holder(out)
    try:
        for command in (["train", *world.base], ["compare", *world.base, "--force"], ["demo"]):
            code, _, error = command_line(monkeypatch, capsys, *command, "--out", out)
            assert code == 2 and error.count("\n") == 1 and "another process is writing into" in error
        with pytest.raises(Busy):
            pf2lora.federate(**world.settings(), out=out)
        assert list(out.iterdir()) == []
    finally:
        process.kill()
        process.wait()
    pf2lora.federate(**world.settings(), out=out)
    file = write_jsonl(tmp_path / "east.jsonl", sentences(30, 9))
    process = holder(out)
    try:
        with pytest.raises(Busy):
            onboard(load_run(out), "east", file)
    finally:
        process.kill()
        process.wait()
    assert not (out / "clients" / "east").exists()


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with locked(tmp_path), locked(tmp_path):
        (tmp_path / "written").write_text("by two, as before there was a lock")
    assert (tmp_path / "written").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made: Not a directory"), locked(tmp_path / "file" / "run"):
        pass
