"""Keys that are made where they live: requests, signatures, kits, renewal, and who is let in no more."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cryptography import x509
from flare_federation import Flare
from small_federation import make_plan, write_data, write_model, write_site_file
from typer.testing import CliRunner

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")


from pf2lora.cli.federation import app
from pf2lora.errors import UserError
from pf2lora.federation.flare import admin, front, processes
from pf2lora.federation.flare.keys import (
    check_known,
    make_authority,
    make_kit,
    make_request,
    remove,
    sign,
)
from pf2lora.federation.flare.rehearse import listening
from pf2lora.federation.flare.resumer import RunResumer, note
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.policy import Policy, read_policy
from pf2lora.federation.protocol.removals import REMOVED, removed
from pf2lora.federation.protocol.run_status import SITES

PROJECT = """name = "clinics"
host = "localhost"
port = {port}
sites = ["site-2"]
lead = "lead@pf2lora.local"
"""


class Made:
    """An authority, and what participants made with it."""

    def __init__(self, root: Path, port: int = 18300) -> None:
        self.root = root
        (root / "project.toml").write_text(PROJECT.format(port=port))
        self.fingerprint = make_authority(root / "project.toml", root / "authority", 100)
        named = root / "authority" / "project.toml"  # site-1 comes later, to the same authority
        named.write_text(named.read_text().replace('["site-2"]', '["site-1", "site-2"]'))

    def kit(self, name: str, kind: str = "site", days: int = 50, folder: str = "", key: str = "key") -> Path:
        """Request, signature and kit."""
        request = make_request(name, kind, "clinics", self.root / f"{key}-{name}")
        sign(request, self.root / "authority", self.root / f"{key}-{name}.zip", days)
        kit = self.root / "kits" / (folder or name)
        return make_kit(self.root / f"{key}-{name}.zip", self.root / f"{key}-{name}", self.fingerprint, kit)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    found = Made(tmp_path_factory.mktemp("keys"))
    found.kit("site-1")
    return found


def test_the_authority_has_no_key_but_its_own(made: Made) -> None:
    authority = made.root / "authority"
    assert sorted(file.name for file in authority.rglob("*.key")) == ["rootCA.key"]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in authority.iterdir())
    key = (made.root / "key-site-1" / "site-1.key").read_bytes()
    assert not any(key in file.read_bytes() for file in authority.iterdir())
    with zipfile.ZipFile(made.root / "key-site-1" / "site-1.request.zip") as request:
        assert not any(b"PRIVATE KEY" in request.read(name) for name in request.namelist())
    assert audit.verify(authority).lines == 2


def test_a_kit_is_as_hardened_as_those_of_provision(made: Made) -> None:
    kit = made.root / "kits" / "site-1"
    assert processes.open_kit(kit).name == "site-1"
    assert 47 <= processes.days_left(processes.open_kit(kit)) <= 50
    assert stat.S_IMODE((kit / "startup" / "client.key").stat().st_mode) == 0o600
    assert (
        json.loads((kit / "local" / "resources.json").read_text())["class_list_enforcement_mode"] == "enforce"
    )
    assert read_policy(kit / "local" / "policy.toml") == Policy()
    assert not (kit / "startup" / "sub_start.sh").exists()
    who = KitIdentity.of(kit / "startup")  # with which it signs its masks
    who.check("site-1", who.certificate, b"keys", who.sign(b"keys"))


def test_a_kit_is_renewed_and_keeps_its_own_rules(made: Made) -> None:
    kit = made.root / "kits" / "site-1"
    (kit / "local" / "policy.toml").write_text("min_rows = 99")
    audit.record(kit, "sent")
    before = (kit / "startup" / "client.crt").read_bytes()
    made.kit("site-1", days=70, key="new")
    after = (kit / "startup" / "client.crt").read_bytes()
    assert after != before and processes.days_left(processes.open_kit(kit)) >= 67
    assert read_policy(kit / "local" / "policy.toml").min_rows == 99
    assert audit.verify(kit).lines == 1
    again = (made.root / "new-site-1.zip", made.root / "new-site-1", made.fingerprint, kit)
    with processes.locked(processes.open_kit(kit)), pytest.raises(UserError, match="running already"):
        make_kit(*again)
    assert (kit / "startup" / "client.crt").read_bytes() == after
    file = kit / "startup" / "fed_client.json"
    file.write_text(file.read_text().replace('"site-1"', '"site-2"'))
    with pytest.raises(UserError, match="kit of another participant"):
        make_kit(*again)
    file.write_text(file.read_text().replace('"site-2"', '"site-1"'))


def test_a_server_knows_the_sites_that_were_signed_and_its_renewal_those_that_came_since(made: Made) -> None:
    kit = made.kit("localhost", "server", folder="server")
    assert json.loads((kit / "local" / "sites.json").read_text()) == ["site-1", "site-2"]
    check_known(kit, ["site-2", "site-1"])
    with pytest.raises(UserError, match=r"unknown site 'site-3'; did you mean .* once it has joined"):
        check_known(kit, ["site-1", "site-3"])
    note(kit / SITES, "site-3")  # it was signed since, and has joined
    check_known(kit, ["site-1", "site-3"])
    named = made.root / "authority" / "project.toml"
    text = named.read_text()
    named.write_text(text.replace('"site-2"]', '"site-2", "site-4"]'))
    try:
        made.kit("localhost", "server", folder="server", key="new")
    finally:
        named.write_text(text)
    check_known(kit, ["site-4"])
    assert not (made.root / "kits" / "site-1" / "local" / "sites.json").exists()


def test_a_signed_answer_that_is_none_is_one_line(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "signed.zip"
    for content in (b"nothing", b"PK\x03\x04"):
        file.write_bytes(content)
        with pytest.raises(UserError, match="is not what the authority sends back"):
            make_kit(file, made.root / "key-site-1", made.fingerprint, tmp_path / "kit")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("sites.json", '{"a": 1}')
    with pytest.raises(UserError, match="its list of sites is none"):
        make_kit(file, made.root / "key-site-1", made.fingerprint, tmp_path / "kit")


@pytest.mark.parametrize(
    ("name", "kind", "project"),
    [
        ("site-9", "client", "clinics"),
        ("site-1", "client", "others"),
        ("guest@x.org", "lead", "clinics"),
        ("lead@pf2lora.local", "member", "clinics"),
        ("elsewhere", "server", "clinics"),
        ("localhost", "client", "clinics"),
    ],
)
def test_only_who_is_named_is_signed(made: Made, tmp_path: Path, name: str, kind: str, project: str) -> None:
    with zipfile.ZipFile(tmp_path / "request.zip", "w") as request:
        request.writestr("request.json", json.dumps({"name": name, "cert_type": kind, "project": project}))
    with pytest.raises(UserError, match="does not name so: add it there first"):
        sign(tmp_path / "request.zip", made.root / "authority", tmp_path / "signed.zip", 10)
    assert not (tmp_path / "signed.zip").exists()


def test_a_request_that_is_put_together_is_refused_by_flare(made: Made, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "request.zip", "w") as request:
        request.writestr(
            "request.json", json.dumps({"name": "site-1", "cert_type": "client", "project": "clinics"})
        )
    with pytest.raises(UserError, match="FLARE refused: "):
        sign(tmp_path / "request.zip", made.root / "authority", tmp_path / "signed.zip", 10)


def test_a_wrong_fingerprint_makes_no_kit(made: Made) -> None:
    wrong = made.fingerprint[:-2] + ("00" if made.fingerprint[-2:] != "00" else "11")
    with pytest.raises(UserError, match="FLARE refused"):
        make_kit(made.root / "key-site-1.zip", made.root / "key-site-1", wrong, made.root / "kits" / "wrong")
    assert not (made.root / "kits" / "wrong").exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"w1 w2"])
def test_what_is_no_request_is_one_line(made: Made, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "request.zip").write_bytes(content)
    with pytest.raises(UserError, match="is no request"):
        sign(tmp_path / "request.zip", made.root / "authority", tmp_path / "signed.zip", 10)


def test_folders_that_hold_something_are_left_alone(made: Made) -> None:
    with pytest.raises(UserError, match="is not empty"):
        make_authority(made.root / "project.toml", made.root / "authority", 10)
    with pytest.raises(UserError, match="is not empty"):
        make_request("site-1", "site", "clinics", made.root / "key-site-1")
    with pytest.raises(UserError, match="no kind of participant"):
        make_request("site-1", "sites", "clinics", made.root / "kind")


def test_join_speaks_of_a_certificate_that_ends_soon(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    monkeypatch.setattr(front, "in_foreground", lambda *how: 0)
    kit = made.root / "kits" / "site-1"
    assert "ends in" not in CliRunner().invoke(app, ["join", str(kit)]).output
    monkeypatch.setattr(processes, "days_left", lambda kit: 29)
    assert (
        "the certificate of site-1 ends in 29 days: renew it"
        in CliRunner().invoke(app, ["join", str(kit)]).output
    )


def test_the_days_of_a_certificate_are_those_of_its_dates(made: Made) -> None:
    kit = made.root / "kits" / "site-1"
    ends = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes()).not_valid_after_utc
    assert abs(
        datetime.now(UTC) + timedelta(days=processes.days_left(processes.open_kit(kit))) - ends
    ) <= timedelta(1)


# --- who is let in no more ----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Path:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_server.json").touch()
    return tmp_path


def test_a_removed_site_is_on_flares_own_list(server: Path) -> None:
    from nvflare.private.fed.server.client_manager import ClientManager

    remove(server, "site-1")
    remove(server, "site-2")
    remove(server, "site-1", back=True)
    assert removed(server) == ["site-2"]
    manager = ClientManager(project_name="clinics")
    manager.set_disabled_clients_file(str(server / REMOVED))
    assert manager.is_client_disabled("site-2") and not manager.is_client_disabled("site-1")
    assert audit.verify(server).lines == 3
    with pytest.raises(UserError, match="site-1 was not removed"):
        remove(server, "site-1", back=True)
    with pytest.raises(UserError, match="is no kit of the server or a site"):
        remove(server / "startup", "site-1")
    (server / REMOVED).write_text('{"disabled_clients": 3}')
    with pytest.raises(UserError, match="is damaged"):
        removed(server)


def test_a_removed_site_that_is_turned_away_gives_nobody_else_back(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvflare.private.fed.server.client_manager import ClientManager

    monkeypatch.chdir(server)
    remove(server, "site-0")
    manager = ClientManager(project_name="clinics")
    manager.set_disabled_clients_file(str(server / REMOVED))  # as FLARE's server does when it is made
    engine, resumer = Mock(), RunResumer()
    engine.server.client_manager = manager
    jobs = Mock(get_jobs_by_status=lambda *which: [], get_all_jobs=lambda *which: [])
    engine.get_component.return_value = jobs
    context: Any = SimpleNamespace(get_engine=lambda: engine)
    resumer.started(context)
    for name in ("lead@pf2lora.local", "site-1", "site-2"):
        remove(server, name)
    remove(server, "site-0", back=True)
    resumer.turn_away("site-1", context)
    assert manager.is_client_disabled("site-0") and manager.is_client_disabled("site-1")
    assert removed(server) == ["lead@pf2lora.local", "site-1", "site-2"]


def test_a_running_server_turns_a_removed_site_away(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server)
    turned: list[str] = []
    manager = SimpleNamespace(disable_client=turned.append)
    context: Any = SimpleNamespace(
        get_engine=lambda: SimpleNamespace(server=SimpleNamespace(client_manager=manager))
    )
    resumer = RunResumer()
    resumer.turn_away("site-1", context)
    assert turned == []
    remove(server, "site-1")
    resumer.turn_away("site-1", context)
    resumer.turn_away("site-2", context)
    assert turned == ["site-1"]


@pytest.mark.slow
def test_a_federation_of_such_kits_runs_and_a_removed_site_stays_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path, processes.free_port())
    sites = ("site-1", "site-2")
    plan = make_plan("homlora", sites, config={"rounds": 2}, deadline=60)
    write_model(tmp_path / "model")
    write_data(tmp_path, sites)
    kits = {name: made.kit(name) for name in sites}
    kits["server"] = made.kit("localhost", "server", folder="server")
    kits["lead@pf2lora.local"] = made.kit("lead@pf2lora.local", "lead")
    for site in sites:
        write_site_file(kits[site] / "local" / "site.toml", tmp_path, site)
    run = Flare(tmp_path, plan, kits)
    try:
        run.start("server")
        lead = kits["lead@pf2lora.local"]
        run.wait(lambda: listening(processes.open_kit(kits["server"]).port), 60, "the server")
        with pytest.raises(UserError, match=r"^unknown site 'site-22'; did you mean 'site-2'"):
            admin.submit(lead, replace(plan, sites=("site-1", "site-22"), quorum=1.0))
        run.submit()
        waits = "it waits for sites, of which 1 are needed: site-1, site-2 not connected"
        assert f"run 'trial': {waits}" in capfd.readouterr().err
        (queued,) = admin.runs(lead)
        assert (queued["pf2lora"]["state"], queued["pf2lora"]["line"]) == ("queued", waits)
        run.start(*sites)
        run.wait(lambda: run.state() == "finished", 180, "the end")
        twin = tmp_path / "twin"
        shutil.copytree(kits["site-1"], twin, ignore=shutil.ignore_patterns("lock"))
        join = [sys.executable, "-m", "pf2lora", "federation", "join", str(twin)]
        refused = subprocess.run(join, capture_output=True, text=True, timeout=90, check=False)
        assert refused.returncode == 2
        assert "the server refused site-1: it was removed, or one is connected" in refused.stderr
        run.wait(lambda: "a second site-1 was refused" in run.log("server"), 10, "the server to say so")
        heard = kits["server"] / "alive" / "site-1"
        then = time.time()
        run.wait(lambda: heard.stat().st_mtime > then, 60, "the first to be heard of again")
        remove(kits["server"], "site-2")
        with pytest.raises(UserError, match="site-2 was removed from this federation"):
            run.submit()
        run.wait(lambda: "Client site-2 disabled" in run.log("server"), 60, "site-2 to be turned away")
        assert "Client site-1 disabled" not in run.log("server")
        processes.stop(run.started.pop("site-2"))
        join[-1] = str(kits["site-2"])
        gone = subprocess.run(join, capture_output=True, text=True, timeout=90, check=False)
        assert gone.returncode == 2 and "the server refused site-2: it was removed" in gone.stderr
    finally:
        processes.stop(*run.started.values())
