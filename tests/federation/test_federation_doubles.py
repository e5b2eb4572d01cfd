"""Whom the server refuses when it registers: a second one with a connected site's kit, and who was removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.fl_exception import NotAuthenticated

from pf2lora.errors import UserError
from pf2lora.federation.flare import processes
from pf2lora.federation.flare.doubles import Connections
from pf2lora.federation.flare.keys import remove
from pf2lora.federation.flare.resumer import RunResumer
from pf2lora.federation.kit import Kit
from pf2lora.federation.protocol import audit


@pytest.fixture
def server(tmp_path: Path) -> Path:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_server.json").touch()
    return tmp_path


@pytest.fixture
def resumer(server: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunResumer, list[float]]:
    """A server's, and its clock."""
    monkeypatch.chdir(server)
    made, now = RunResumer(), [0.0]
    made.connections = Connections(lambda: now[0])
    return made, now


def test_a_second_site_with_the_same_kit_is_refused(
    server: Path, resumer: tuple[RunResumer, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    made, now = resumer
    made.refuse_double("site-1")  # the first
    made.heard("site-1", registered=True)
    now[0] = 20.0
    for second in (20.0, 60.0, 100.0):  # it comes again, and takes the first's connection each time
        now[0] = second
        with pytest.raises(NotAuthenticated, match="a second site-1 was refused"):
            made.refuse_double("site-1")
        made.connections.closed("site-1")  # the second's
    assert capsys.readouterr().err.count("a second site-1 was refused") == 3
    assert audit.verify(server).lines == 3
    made.heard("site-1", registered=False)  # the first is back
    now[0] = 124.0
    with pytest.raises(NotAuthenticated):
        made.refuse_double("site-1")
    now[0] = 221.0  # the first has been silent for two minutes
    made.refuse_double("site-1")


def test_a_site_that_was_started_again_is_let_in(resumer: tuple[RunResumer, list[float]]) -> None:
    made, now = resumer
    made.heard("site-1", registered=True)
    now[0] = 1.0
    assert made.connections.lives("site-1")
    made.connections.closed("site-1")  # who is killed closes its connection
    made.refuse_double("site-1")  # raises nothing
    made.heard("site-1", registered=True)
    assert made.connections.lives("site-1")
    now[0] = 27.0  # its machine lost power: nothing was closed
    made.refuse_double("site-1")


def test_a_removed_site_is_told_so_when_it_registers(
    server: Path, resumer: tuple[RunResumer, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = resumer
    remove(server, "site-1")
    for _ in range(2):
        with pytest.raises(NotAuthenticated, match="site-1 was refused: it was removed"):
            made.refuse_removed("site-1")
    assert capsys.readouterr().err.count("site-1 was refused") == 1, "it may try for months"
    made.refuse_removed("site-2")


def test_people_may_look_from_two_places(
    resumer: tuple[RunResumer, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = resumer
    for _ in range(2):
        made.refuse_double("lead@example.org")
        made.heard("lead@example.org", registered=True)
    assert capsys.readouterr().err == ""


def test_a_site_that_registers_while_it_is_heard_of_is_spoken_of(
    server: Path, resumer: tuple[RunResumer, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    made, now = resumer
    made.heard("site-1", registered=True)
    made.heard("site-1", registered=False)  # a heartbeat
    assert capsys.readouterr().err == "" and not (server / audit.FILE).exists()
    made.heard("site-1", registered=True)
    assert "site-1 registered while it was heard of" in capsys.readouterr().err
    assert audit.verify(server).lines == 1
    now[0] = 26.0  # long silent
    made.heard("site-1", registered=True)
    assert audit.verify(server).lines == 1


def test_join_says_that_it_was_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = tmp_path / processes.ERRORS
    kit = Kit(tmp_path, "site-1", server=False)
    script = f"open({str(errors)!r}, 'a').write('registration rejected: x'); raise SystemExit(101)"
    made = [sys.executable, "-c", script]
    monkeypatch.setattr(processes, "start", lambda kit, log: subprocess.Popen(made))
    for _ in range(2):
        with pytest.raises(UserError, match="the server refused site-1: it was removed, or one is connected"):
            processes.in_foreground(kit)
    made[2] = "raise SystemExit(4)"  # what the log holds is of another time
    assert processes.in_foreground(kit) == 4
