"""`federation doctor`: each check finds what is wrong with its part, and the others are still done."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from small_federation import write_data, write_model, write_site_file
from typer.testing import CliRunner

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from pf2lora.cli.federation import app
from pf2lora.errors import UserError
from pf2lora.federation.flare import doctor, processes, reach
from pf2lora.federation.flare.provision import Project, provision
from pf2lora.federation.kit import Kit
from pf2lora.federation.protocol import checkup
from pf2lora.federation.protocol.checkup import Check, examine, free_space

SITE = "site-1"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits of two projects on one port; only the second project's server is ever started."""
    root = tmp_path_factory.mktemp("doctor")
    write_model(root / "model")
    write_data(root, (SITE,))
    port = processes.free_port()
    for project in ("kits", "others"):
        provision(Project("trial", "localhost", (SITE,), port=port), root / project)
    return root


@pytest.fixture
def kit(root: Path) -> Iterator[Path]:
    """A site's kit as it should be, whatever a test did to it before."""
    kit = root / "kits" / SITE
    before = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    write_site_file(kit / "local" / "site.toml", root, SITE)
    yield kit
    for path, data in before.items():
        path.write_bytes(data)
        path.chmod(0o600)


@contextmanager
def listening(kit: Kit, authority: Path | None = None) -> Iterator[None]:
    """A server with the certificate of `kit`, that greets who has a certificate of `authority`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit.certificate, kit.key)
    context.load_verify_locations(authority or kit.root)
    context.verify_mode = ssl.CERT_REQUIRED

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(raw, server_side=True) as tls:
                    assert tls.recv(64).startswith(b"PRI * HTTP/2.0")
                    tls.sendall(b"\0\0\0\4\0\0\0\0\0")
            except OSError:
                continue

    with socket.create_server(("localhost", kit.port)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def found(*arguments: str | Path) -> tuple[int, dict[str, Check]]:
    """What the command finds, by the checks' names, and its exit code."""
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    said = json.loads(done.stdout)
    checks = [Check(**check) for check in said["checks"]]
    assert said["ok"] is (done.exit_code == 0)
    return done.exit_code, {check.name: check for check in checks}


def test_a_site_that_can_take_part(root: Path, kit: Path) -> None:
    with listening(processes.read_kit(root / "kits" / "server")):
        code, checks = found(kit)
    assert code == 0, checks
    assert {check.state for name, check in checks.items() if name != "clock"} == {"ok"}
    assert checks["clock"].state in ("ok", "warning")  # the kernel's clock may be left alone here
    assert "its own and the server's" in checks["clock"].line
    assert "and takes ours" in checks["server"].line
    assert checks["data"].line.startswith("40 training, 20 test, 12 validation rows for classification")
    assert "columns text, label; 2 labels" in checks["data"].line
    assert "on cpu, digest " in checks["model"].line
    assert "loss 0." in checks["one step"].line
    assert not (root / "state").exists(), "a look leaves nothing behind"


def test_in_a_pipe_from_elsewhere_a_line_for_each_check(kit: Path, tmp_path: Path) -> None:
    (kit / "local" / "site.toml").write_text('modle = "x"')
    done = subprocess.run(
        [sys.executable, "-m", "pf2lora", "federation", "doctor", kit],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "warning", "wrong", "skipped") for line in lines)
    assert any(line.startswith("wrong    site.toml: ") and "did you mean 'model'" in line for line in lines)
    assert [line.split()[0] for line in lines[-5:]] == ["skipped"] * 5


def test_what_a_run_would_say_of_the_rows(root: Path, kit: Path) -> None:
    """A test file that is the training file, and nothing to choose by."""
    file = kit / "local" / "site.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("validation")]
    same = "\n".join(lines).replace(str(root / "test"), str(root / "train"))
    file.write_text(f"{same}\nvalidation_ratio = 0.0\n")
    check = found(kit)[1]["rows"]
    assert check.state == "warning"
    assert check.line.startswith("rows to train on are tested on, too: 40 of 40 test rows of client 'site-1'")
    assert "; no validation rows: what is served after the last round is deployed" in check.line


def test_nobody_listens(kit: Path) -> None:
    code, checks = found(kit)
    assert code == 1
    assert checks["server"].state == "wrong" and "nothing listens at localhost:" in checks["server"].line
    assert checks["one step"].state == "ok", "the rest is looked at all the same"


def test_a_server_of_another_authority_and_one_that_does_not_know_ours(root: Path, kit: Path) -> None:
    ours, theirs = (processes.read_kit(root / name / "server") for name in ("kits", "others"))
    opened = processes.read_kit(kit)
    with listening(theirs), pytest.raises(UserError, match="is no server of this federation"):
        doctor.server(opened, [])
    with listening(ours, theirs.root), pytest.raises(UserError, match="this certificate"):
        doctor.server(opened, [])


def test_an_unknown_host_is_named(kit: Path) -> None:
    file = kit / "startup" / "fed_client.json"
    file.write_text(file.read_text().replace("localhost:", "nowhere.invalid:"))
    with pytest.raises(UserError, match=r"no address is known for 'nowhere\.invalid'"):
        doctor.server(processes.read_kit(kit), [])


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", r"does not let localhost:\d+ through \(HTTP/1.1 403 Forbidden\)"),
        (b"", "no answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n", ""),
    ],
)
def test_the_way_leads_through_the_proxy_that_grpc_would_take(
    kit: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, line: str
) -> None:
    heard: list[bytes] = []

    def serve() -> None:
        raw, _ = listener.accept()
        with raw:
            heard.append(raw.recv(4096))
            raw.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        if line:
            with pytest.raises(UserError, match=line):
                reach.connected("localhost", 18999)
        else:
            reach.connected("localhost", 18999).close()
        thread.join()
    assert heard[0].startswith(b"CONNECT localhost:18999 HTTP/1.1\r\n")
    with pytest.raises(UserError, match="cannot be reached"):
        reach.connected("localhost", 18999)
    monkeypatch.setenv("no_proxy", "example.org, *host")
    assert reach.proxy_for("localhost") is None and reach.proxy_for("example.com") is not None


def test_certificates_and_keys(root: Path, kit: Path) -> None:
    startup, others = kit / "startup", root / "others" / SITE / "startup"
    opened = processes.read_kit(kit)
    (startup / "client.key").chmod(0o640)
    with pytest.raises(UserError, match="can be read by others: chmod 600"):
        doctor.keys(opened)
    (startup / "client.key").write_bytes((others / "client.key").read_bytes())
    with pytest.raises(UserError, match=r"is not the key of client\.crt"):
        doctor.certificate(opened)
    (startup / "client.crt").write_bytes((others / "client.crt").read_bytes())
    with pytest.raises(UserError, match="is not signed by the authority"):
        doctor.certificate(opened)
    (startup / "client.key").unlink()
    for look in (doctor.keys, doctor.certificate):
        with pytest.raises(UserError, match=r"client\.(key|crt) is"):
            look(opened)
    (startup / "rootCA.pem").write_text("{")
    code, checks = found(kit)
    assert code == 1 and checks["certificate"].state == "wrong"
    assert {checks[name].state for name in ("server", "clock")} == {"skipped"}


def test_a_certificate_that_ends_soon_is_a_warning(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "days_left", lambda kit: 29)
    check = examine("certificate", lambda: doctor.certificate(processes.read_kit(kit)))
    assert check.state == "warning" and "29 days left: renew it" in check.line


def test_a_clock_before_the_certificates(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Early(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2020, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(doctor, "datetime", Early)
    with pytest.raises(
        UserError, match=r"it is 2020-01-01 00:00 UTC here, and a certificate begins at .*: set the"
    ):
        doctor.clock(processes.read_kit(kit), [])


def test_a_sites_own_files(root: Path, kit: Path, tmp_path: Path) -> None:
    local, file = kit / "local", kit / "local" / "site.toml"
    good = file.read_text()
    (local / "policy.toml").write_text("min_rows = 41")
    _, checks = found(kit)
    assert checks["data"].state == "wrong" and "min_rows is 41" in checks["data"].line
    assert checks["one step"].state == "ok"  # it can be done, and is not wanted
    (local / "policy.toml").write_text("min_row = 41")
    file.write_text(good.replace(str(root / "model"), "/nowhere/model"))
    _, checks = found(kit)
    assert "did you mean 'min_rows'" in checks["policy.toml"].line
    assert checks["data"].state == "ok" and checks["model"].state == "wrong"
    (local / "policy.toml").unlink()
    file.write_text(good)
    (tmp_path / "run.toml").write_text("[training]\nsteps = 1\n")
    _, checks = found(kit, "--task", "question-answering")
    assert checks["policy.toml"].state == "warning" and "the defaults hold" in checks["policy.toml"].line
    assert checks["data"].state == "wrong", "these are no questions"
    (local / "policy.toml").write_text("min_steps = 2")
    _, checks = found(kit, "--run", tmp_path / "run.toml")
    assert checks["policy.toml"].line.endswith("min_steps is 2, and the run's steps a round are 1")


def test_the_secret_of_batches_is_one(root: Path, kit: Path, tmp_path: Path) -> None:
    write_site_file(kit / "local" / "site.toml", root, SITE, state=tmp_path)
    (tmp_path / "batch-secret").write_text("x")
    (tmp_path / "batch-secret").chmod(0o644)
    _, checks = found(kit)
    assert checks["disk"].line == f"{tmp_path / 'batch-secret'} can be read by others: chmod 600 it"


def test_a_disk_that_is_full_and_one_that_is_nearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "free")
    for free, state in ((1e8, "wrong"), (1e9, "warning"), (1e10, "ok")):
        monkeypatch.setattr(checkup.shutil, "disk_usage", lambda path, free=free: usage(free))
        assert examine("disk", lambda: free_space(tmp_path / "not" / "yet")).state == state
    monkeypatch.setattr(checkup.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="may not be written by this user"):
        free_space(tmp_path)


def test_what_a_check_did_not_expect_is_what_it_found() -> None:
    def breaks() -> str:
        raise RuntimeError("CUDA\nerror")

    assert examine("one step", breaks) == Check("one step", "wrong", "RuntimeError: CUDA error")


def test_the_server(root: Path) -> None:
    kit = root / "kits" / "server"
    opened = processes.read_kit(kit)
    code, checks = found(kit)
    assert code == 0 and list(checks)[-5:] == ["clock", "port", "disk", "removed sites", "audit log"]
    assert checks["port"].line == f"{opened.port} is free; sites must be let through to it"
    with socket.create_server(("", opened.port)):
        code, checks = found(kit)
        assert code == 1 and f"port {opened.port} is in use" in checks["port"].line
        with processes.locked(opened):
            assert "runs from this kit and listens" in doctor.own_port(opened)
    with processes.locked(opened), pytest.raises(UserError, match="nothing listens on"):
        doctor.own_port(opened)
    (kit / "disabled_clients.json").write_text('{"disabled_clients": 3}')
    assert found(kit)[1]["removed sites"].state == "wrong"
    (kit / "disabled_clients.json").unlink()
    (kit / "local" / "resources.json").rename(kit / "away")
    assert "resources.json is missing" in found(kit)[1]["kit"].line
    (kit / "away").rename(kit / "local" / "resources.json")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "there is no such kit"),
        (["."], "is no start-up kit of a server or a site"),
        (["kits/server", "--labels", "a,b"], "are for a site"),
        (["kits/site-1", "--run", "none.toml"], "no such config file"),
    ],
)
def test_what_cannot_be_looked_at(
    root: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(root)
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(done.exception, UserError) and line in str(done.exception)
