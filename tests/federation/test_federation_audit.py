"""The audit log: unbroken while nobody touches it, broken at the line that somebody did."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pf2lora.cli.federation import app
from pf2lora.errors import CannotWrite, UserError
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.audit import FILE, FIRST, record, verify


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    for number in range(1, 6):
        record(tmp_path, "sent", kind="update", round=number, why="käse" * number)
    return tmp_path


def test_lines_follow_from_each_other(kit: Path) -> None:
    lines = (kit / FILE).read_bytes().splitlines()
    found = verify(kit)
    assert found.lines == 5 == len(lines) and found.cut == 0
    assert json.loads(lines[0])["before"] == FIRST
    assert json.loads(lines[3])["before"] == audit.digest(lines[2])
    assert found.last == audit.digest(lines[4])
    assert (kit / FILE).stat().st_mode & 0o777 == 0o600


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a word": (lambda lines: [*lines[:2], lines[2].replace(b"update", b"scores"), *lines[3:]], 4),
    "a line removed": (lambda lines: [*lines[:2], *lines[3:]], 3),
    "the first removed": (lambda lines: lines[1:], 1),
    "two swapped": (lambda lines: [lines[1], lines[0], *lines[2:]], 1),
    "one twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
    "garbage": (lambda lines: [*lines[:2], b"w1 w2", *lines[2:]], 4),
    "garbage twice": (lambda lines: [*lines[:2], b"w1", b"w2", *lines[2:]], 3),
    "no object": (lambda lines: [*lines[:4], b"[1]"], 5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_changed_is_found(kit: Path, name: str) -> None:
    change, number = CHANGES[name]
    lines = change((kit / FILE).read_bytes().splitlines())
    (kit / FILE).write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=rf"line {number} does not follow"):
        verify(kit)


def test_a_missing_end_is_found_by_who_noted_it(kit: Path) -> None:
    noted = verify(kit).last
    record(kit, "sent")
    assert verify(kit, noted).lines == 6
    lines = (kit / FILE).read_bytes().splitlines()
    (kit / FILE).write_bytes(b"\n".join(lines[:4]) + b"\n")
    assert verify(kit).lines == 4  # the chain alone cannot tell
    with pytest.raises(UserError, match="lines that were there are gone"):
        verify(kit, noted)


def test_a_line_that_a_crash_cut_off_is_said_and_no_break(kit: Path) -> None:
    with (kit / FILE).open("ab") as file:
        file.write(b'{"time": 1.0, "ev')
    assert verify(kit).cut == 1
    record(kit, "sent")
    found = verify(kit)
    assert found.lines == 8 and found.cut == 1
    assert json.loads((kit / FILE).read_bytes().splitlines()[6])["event"] == "cut"


def test_long_lines_and_many_writers(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for _ in range(10):
            record(tmp_path, "sent", why="x" * 3000 * number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify(tmp_path).lines == 40


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(CannotWrite, match=FILE):
        record(tmp_path, "sent")
    with pytest.raises(UserError, match="no audit log that can be read"):
        verify(tmp_path / "none")


def test_the_command_says_it(kit: Path) -> None:
    said = CliRunner().invoke(app, ["verify", str(kit)])
    assert said.exit_code == 0
    assert said.output == f"{kit / FILE}: 5 lines, unbroken; the last is {verify(kit).last}\n"
    os.truncate(kit / FILE, 10)
    with (kit / FILE).open("ab") as file:
        file.write(b"\n{}\n")
    assert isinstance(CliRunner().invoke(app, ["verify", str(kit)]).exception, UserError)
