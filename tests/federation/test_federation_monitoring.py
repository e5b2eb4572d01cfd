"""Figures for Prometheus and events for a log: right, from the kit's own files, and nothing private among them."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from figures import figures, private_words
from typer.testing import CliRunner

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from pf2lora.cli.federation import app
from pf2lora.cli.federation_watch import described, happened
from pf2lora.errors import UserError
from pf2lora.federation.flare import front, processes
from pf2lora.federation.flare.processes import free_port
from pf2lora.federation.kit import Kit
from pf2lora.federation.protocol.kit_events import KitEvents
from pf2lora.federation.protocol.metrics import Participant, address, exposition, published, runs
from pf2lora.federation.protocol.run_status import ALIVE, Status, run_folder, write_status


def put(kit: Path, run: str = "first", **values: Any) -> None:
    """Where a run stands, in its folder."""
    folder = run_folder(kit, run)
    folder.mkdir(parents=True, exist_ok=True)
    standing: dict[str, Any] = {"state": "running", "round": 3, "rounds": 9}
    write_status(folder, Status(**standing | values))


def heard(kit: Path, site: str, ago: float = 0.0) -> None:
    (kit / ALIVE).mkdir(exist_ok=True)
    (kit / ALIVE / site).touch()
    os.utime(kit / ALIVE / site, (time.time() - ago, time.time() - ago))


def test_the_servers_figures(tmp_path: Path) -> None:
    put(tmp_path, loss=0.5, seconds=2.5, received=70, sent=90, present=["a", "b"], left_out={"c": "secret"})
    put(tmp_path, "second", state="waiting", line='below its "quorum"')
    heard(tmp_path, "a")
    heard(tmp_path, "b", ago=61)
    heard(tmp_path, "lead@example.org")
    text = exposition(Participant(tmp_path, "server", True, 2e9))
    found = figures(text)
    assert found["pf2lora_certificate_expiry_timestamp_seconds"] == 2e9
    assert found["pf2lora_sites_connected"] == 1
    assert abs(found['pf2lora_site_last_seen_timestamp_seconds{site="a"}'] - time.time()) < 60
    expected = {"round": 3, "rounds": 9, "training_loss": 0.5, "round_seconds": 2.5, "sites_present": 2}
    expected |= {"received_bytes_total": 70, "sent_bytes_total": 90, "sites_left_out": 1, "run_problem": 0}
    for name, value in expected.items():
        assert found[f'pf2lora_{name}{{run="first"}}'] == value
    assert found['pf2lora_run_problem{run="second"}'] == 1
    assert found['pf2lora_run_state{run="second",state="waiting"}'] == 1
    assert 'pf2lora_training_loss{run="second"}' not in found, "of a private run there is no loss"
    assert "secret" not in text and "quorum" not in text and "example.org" not in text
    for name in {key.partition("{")[0] for key in found}:
        assert text.count(f"# TYPE {name} ") == text.count(f"# HELP {name} ") == 1


def test_a_sites_figures_are_its_own(tmp_path: Path) -> None:
    put(tmp_path, state="stopped", loss=0.25, line="a row of clinic-a.jsonl")
    text = exposition(Participant(tmp_path, "clinic-a", False, 2e9))
    found = figures(text)
    assert (
        found['pf2lora_training_loss{run="first"}'] == 0.25 and found['pf2lora_run_problem{run="first"}'] == 1
    )
    assert not any("sites" in name for name in found)
    assert "row" not in text


def test_a_kit_that_is_new_or_damaged_has_figures_too(tmp_path: Path) -> None:
    who = Participant(tmp_path, 'a "b"\\', False, 2e9)
    assert 'name="a \\"b\\"\\\\"' in exposition(who)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "status.json").write_text("{")
    assert runs(tmp_path) == {}


def test_old_runs_make_no_series(tmp_path: Path) -> None:
    for number in range(25):
        put(tmp_path, f"run-{number}")
    assert len(runs(tmp_path)) == 20 and "run-24" in runs(tmp_path) and "run-0" not in runs(tmp_path)


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_port_of_the_loopback_interface() -> None:
    port, texts = free_port(), iter(["one\n", "two\n"])
    with published(str(port), lambda: next(texts)) as look:
        look()
        assert get(port, "/metrics") == (200, "one\n")
        assert get(port, "/metrics?x=1") == (200, "two\n")
        assert get(port, "/../local/site.toml")[0] == 404
        with pytest.raises(UserError, match="cannot be used"), published(str(port), str):
            pass
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")


def test_a_file_for_the_textfile_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = tmp_path / "pf2lora.prom", [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    texts = iter(["one\n", "two\n", "three\n"])
    with published(str(file), lambda: next(texts)) as look:
        assert file.read_text() == "one\n" and file.stat().st_mode & 0o777 == 0o644
        now[0] = 100.0
        look()
        look()
        assert file.read_text() == "two\n"
        now[0] = 120.0
        look()
        assert file.read_text() == "three\n"
    assert not file.exists(), "figures of who is gone are no figures"
    with pytest.raises(UserError, match="cannot be written"), published(str(tmp_path / "no" / "x.prom"), str):
        pass


@pytest.mark.parametrize("where", ["", "x", "0", "70000", ":9464", "host:", "9464.txt", "²"])
def test_where_figures_cannot_be(where: str) -> None:
    with pytest.raises(UserError, match=r"--metrics is .* it takes a port"):
        address(where)
    assert address("9464") == ("127.0.0.1", 9464)
    assert address("0.0.0.0:9464") == ("0.0.0.0", 9464) and address("[::1]:9464") == ("::1", 9464)


# --- events ---------------------------------------------------------------------------------------------------


def test_events_are_what_changed(tmp_path: Path) -> None:
    put(tmp_path, "before")
    events = KitEvents(Participant(tmp_path, "server", True, 2e9))
    assert list(events.look()) == []
    heard(tmp_path, "a")
    put(tmp_path, round=1, loss=0.5, seconds=2.0, present=["a"], left_out={"b": "no"})
    sites, ended, state = events.look()
    assert sites == ("sites", {"connected": ["a"]})
    told = {"run": "first", "round": 1, "rounds": 9, "loss": 0.5, "seconds": 2.0}
    assert ended == ("round_ended", told | {"present": ["a"], "left_out": {"b": "no"}})
    assert state == ("run_state", {"run": "first", "state": "running", "round": 1, "line": ""})
    assert list(events.look()) == []
    put(tmp_path, round=1, state="failed", line="why")
    assert [name for name, _ in events.look()] == ["run_state"]


def test_the_leads_view_has_the_same_events() -> None:
    def jobs() -> Iterator[dict[str, Any]]:
        yield {"name": "first", "status": "SUBMITTED"}
        for state, number in (("running", 0), ("running", 1), ("running", 1), ("finished", 2)):
            said = {"state": state, "round": number, "rounds": 2, "run": "first", "later": 1}
            yield {"name": "first", "status": "RUNNING", "pf2lora": said}

    names = [(name, told.get("state"), told["round"]) for name, told in happened(jobs())]
    states = [("run_state", "submitted", 0), ("run_state", "running", 0), ("round_ended", None, 1)]
    assert names == [*states, ("round_ended", None, 2), ("run_state", "finished", 2)]


def test_who_was_away_at_the_end_is_told_to_the_lead() -> None:
    now = {
        "state": "finished",
        "round": 3,
        "rounds": 3,
        "absent": ["b"],
        "left_out": {"c": "its disk is full"},
    }
    job = {"name": "first", "status": "FINISHED:COMPLETED", "pf2lora": now}
    assert described(job) == (
        "finished, round 3 of 3; c is left out: its disk is full; b is without the last x"
    )


def test_join_writes_events_and_nothing_else_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import UTC, datetime
    from types import SimpleNamespace

    kit = Kit(tmp_path, "clinic-a", server=False, host="localhost", port=1)
    ends = SimpleNamespace(not_valid_after_utc=datetime(2100, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(front, "open_kit", lambda folder: kit)
    monkeypatch.setattr(processes, "certificates", lambda kit: (ends, ends))

    def runs_for_a_while(kit: Kit, meanwhile: Any, log: Any) -> int:
        assert log is not None, "FLARE's words go to standard error"
        put(kit.folder, round=2, loss=0.5)
        meanwhile()
        return 3

    monkeypatch.setattr(front, "in_foreground", runs_for_a_while)
    file = tmp_path / "x.prom"
    done = CliRunner().invoke(app, ["join", str(tmp_path), "--log", "json", "--metrics", str(file)])
    assert done.exit_code == 3 and not file.exists()
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in said] == ["joined", "round_ended", "run_state", "left"]
    assert said[1]["loss"] == 0.5 and said[1]["time"].endswith("+00:00")
    assert "starting clinic-a" in done.stderr
    refused = CliRunner().invoke(app, ["join", str(tmp_path), "--log", "jsn"])
    assert isinstance(refused.exception, UserError) and "did you mean 'json'" in str(refused.exception)


def test_the_test_would_see_a_row() -> None:
    assert private_words('x{run="w3 w4"} 1') == {"w3", "w4"}
