"""Start-up kits: who gets what, how they are hardened, and one clear line for what cannot be."""

from __future__ import annotations

import datetime
import importlib
import json
import re
import socket
import stat
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from small_federation import make_plan
from typer.testing import CliRunner

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from pf2lora import federation
from pf2lora.cli.federation import app
from pf2lora.errors import UserError
from pf2lora.federation.flare import processes
from pf2lora.federation.flare.admin import session, write_job
from pf2lora.federation.flare.processes import check_port, open_kit, start
from pf2lora.federation.flare.provision import Project, provision, read_project
from pf2lora.federation.protocol.identity import Authority, KitIdentity
from pf2lora.federation.protocol.secure_sum import Refused
from pf2lora.federation.protocol.signed_plan import SignedPlan
from pf2lora.federation.protocol.site_setup import read_site_file

MEMBER = "guest@example.org"


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    project = Project("trial", "localhost", ("clinic-a", "clinic-b"), port=18200, members=(MEMBER,))
    return provision(project, tmp_path_factory.mktemp("federation") / "kits")


def test_a_kits_texts_name_our_commands_and_no_way_around_them(kits: dict[str, Path]) -> None:
    for name, kit in kits.items():
        files = {file.name for file in kit.rglob("*") if file.is_file()}
        assert not files & {"sub_start.sh", "stop_fl.sh", "fl_admin.sh", "system_info.ipynb"}
        readme = (kit / "readme.txt").read_text(encoding="utf8")
        assert f"kit of {name}," in readme
        known = {
            command.name or command.callback.__name__
            for command in app.registered_commands
            if command.callback
        }
        assert set(re.findall(r"pf2lora federation ([a-z]+)", readme)) <= known
        if "@" in name:
            continue
        assert not files & {"resources.json.default", "authorization.json.default", "privacy.json.sample"}
        script = (kit / "startup" / "start.sh").read_text()
        assert "pf2lora federation join" in script and "nvflare" not in script
        assert (kit / "startup" / "start.sh").stat().st_mode & 0o777 == 0o700


def test_only_sites_can_sign_keys_of_masks(kits: dict[str, Path]) -> None:
    """The server's certificate has a name that a site could have."""
    authority = Authority.of(kits["server"] / "startup")
    for name, kit in kits.items():
        own = "server" if name == "server" else "client"
        key = load_pem_private_key((kit / "startup" / f"{own}.key").read_bytes(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        certificate = (kit / "startup" / f"{own}.crt").read_text()
        signature = KitIdentity(authority.root, certificate, key).sign(b"keys")
        if name.startswith("clinic"):
            authority.check(name, certificate, b"keys", signature)
        else:
            with pytest.raises(Refused, match="is no site"):
                authority.check(name, certificate, b"keys", signature)


def test_everybody_gets_a_kit_and_keys_are_their_owners(kits: dict[str, Path]) -> None:
    assert set(kits) == {"server", "clinic-a", "clinic-b", "lead@pf2lora.local", MEMBER}
    root = kits["server"].parent
    keys = [*root.rglob("*.key"), *(root / "authority").iterdir()]
    assert len(keys) == 6
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert open_kit(kits["clinic-a"]).name == "clinic-a"
    assert open_kit(kits["server"]).port == 18200


def test_kits_are_hardened(kits: dict[str, Path]) -> None:
    for name in ("clinic-a", "clinic-b"):
        local = kits[name] / "local"
        resources = json.loads((local / "resources.json").read_text())
        assert resources["class_allow_list"] == ["pf2lora.federation.flare.executor.SiteExecutor"]
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert resources["allow_log_streaming"] is False
        assert not any("log_stream" in c["path"] for c in resources["components"])
        privacy = json.loads((local / "privacy.json").read_text())
        (scope,) = privacy["scopes"]
        assert scope["name"] == privacy["default_scope"]
        assert [f["path"] for f in scope["task_result_filters"]] == [
            "pf2lora.federation.flare.executor.AllowListFilter"
        ]
    server = json.loads((kits["server"] / "local" / "resources.json").read_text())
    assert server["class_allow_list"] == ["pf2lora.federation.flare.controller.FederationController"]
    assert "/tmp" not in json.dumps(server)
    for name in ("server", "clinic-a", "clinic-b"):
        inside = json.loads((kits[name] / "local" / "comm_config.json").read_text())["internal"]["resources"]
        assert inside == {"host": "localhost", "connection_security": "mtls"}
        rights = json.loads((kits[name] / "local" / "authorization.json").read_text())["permissions"]
        assert all(role["byoc"] == "none" and role["shell_commands"] == "none" for role in rights.values())
        assert [role for role, may in rights.items() if may["submit_job"] != "none"] == ["lead"]


def test_kits_notice_a_link_that_was_cut(kits: dict[str, Path]) -> None:
    """FLARE's own waits are minutes: what was on the way when a link was cut is lost, and nothing says so."""
    for name in ("clinic-a", "clinic-b"):
        client = json.loads((kits[name] / "local" / "resources.json").read_text())["client"]
        assert client["communication_timeout"] == 20
    for name in ("server", "clinic-a", "clinic-b"):
        pings = dict(json.loads((kits[name] / "local" / "comm_config.json").read_text())["grpc"]["options"])
        assert pings["grpc.keepalive_time_ms"] + pings["grpc.keepalive_timeout_ms"] <= 15000
        assert pings["grpc.http2.min_recv_ping_interval_without_data_ms"] < pings["grpc.keepalive_time_ms"]
        assert pings["grpc.keepalive_permit_without_calls"] == 1
        assert pings["grpc.http2.max_pings_without_data"] == 0
        assert pings["grpc.max_reconnect_backoff_ms"] <= 5000
        assert pings["grpc.max_receive_message_length"] == pings["grpc.max_send_message_length"] == -1


def test_a_job_carries_a_plan_and_nothing_else(tmp_path: Path) -> None:
    plan = make_plan("pf2lora")
    job = write_job(plan, SignedPlan(plan.to_json()), tmp_path)
    files = sorted(str(p.relative_to(job)) for p in job.rglob("*") if p.is_file())
    assert files == ["app/config/config_fed_client.json", "app/config/config_fed_server.json", "meta.json"]
    text = "".join(p.read_text() for p in job.rglob("*.json"))
    assert "train" not in json.loads((job / "meta.json").read_text())
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('name = "t"\nhost = "h"\nsites = ["a", "a"]', "two sites are called 'a'"),
        ('name = "t"\nhost = "h"\nsites = []', "names no sites"),
        ('name = "t"\nhost = "h"', "sites is missing"),
        ('name = "t"\nhost = "h"\nsites = ["a b"]', "site name 'a b'"),
        ('name = "t"\nhost = "h"\nsites = ["a.b"]', "site name 'a.b'"),
        ('name = "t"\nhost = "h"\nsites = ["authority"]', "taken by the federation itself"),
        ('name = "t"\nhost = "h"\nsites = ["a"]\nprot = 1', "did you mean 'port'"),
        ('name = "t"\nhost = "h"\nsites = ["a"]\nport = 0', "port is 0"),
        ('name = "t"\nhost = "h"\nsites = ["a"]\nlead = "me"', "use an e-mail address"),
        ('name = "t', "not valid TOML"),
    ],
)
def test_a_bad_project_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "project.toml").write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        read_project(tmp_path / "project.toml")
    assert "\n" not in str(caught.value)


def test_kits_are_not_written_over_others(kits: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="is not empty"):
        provision(Project("trial", "localhost", ("a",)), kits["server"].parent)


def test_a_port_in_use_is_named(kits: dict[str, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 18200))
        taken.listen()
        with pytest.raises(UserError, match="port 18200 is in use"):
            check_port(open_kit(kits["server"]))


def test_an_expired_certificate_is_named(tmp_path: Path) -> None:
    kits = provision(Project("trial", "localhost", ("clinic-a",)), tmp_path / "kits")
    expire(kits["clinic-a"] / "startup")
    with pytest.raises(UserError, match=r"the certificate of clinic-a \(client.crt\) expired on 20\d\d-"):
        open_kit(kits["clinic-a"])
    done = CliRunner().invoke(app, ["leave", str(kits["clinic-a"])])
    assert "clinic-a is not running from" in str(done.exception)  # one that runs can be ended all the same


def test_a_lead_hears_of_its_own_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nvflare.fuel.flare_api import api_spec, flare_api

    def nobody(*args: object, **more: object) -> None:
        raise api_spec.NoConnection

    monkeypatch.setattr(flare_api, "new_secure_session", nobody)
    lead = provision(Project("trial", "localhost", ("clinic-a",)), tmp_path / "kits")["lead@pf2lora.local"]
    with pytest.raises(UserError, match="no server answers"), session(lead):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(processes, "days_left", lambda kit: 29)
    with pytest.raises(UserError, match="no server answers"), session(lead):
        pass
    assert "the certificate of lead@pf2lora.local ends in 29 days: renew it" in capsys.readouterr().err
    monkeypatch.undo()
    expire(lead / "startup")
    with (
        pytest.raises(UserError, match=r"the certificate of lead@pf2lora.local .* expired on"),
        session(lead),
    ):
        pass


def test_provision_says_what_it_means(tmp_path: Path) -> None:
    (tmp_path / "project.toml").write_text('name = "t"\nhost = "localhost"\nsites = ["a"]')
    done = CliRunner().invoke(
        app, ["provision", str(tmp_path / "project.toml"), "--out", str(tmp_path / "kits")]
    )
    assert "whoever was here can be any site: between organisations use `authority`" in done.stdout


def expire(folder: Path) -> None:
    """A client.crt that ended yesterday."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    key = load_pem_private_key((folder / "client.key").read_bytes(), None)
    assert isinstance(key, RSAPrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "clinic-a")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(days=9))
    certificate = builder.not_valid_after(now - datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    (folder / "client.crt").write_bytes(certificate.public_bytes(Encoding.PEM))


def test_a_key_that_others_can_read_is_named(tmp_path: Path) -> None:
    kits = provision(Project("trial", "localhost", ("clinic-a",)), tmp_path / "kits")
    (kits["clinic-a"] / "startup" / "client.key").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others: chmod 600"):
        open_kit(kits["clinic-a"])


def test_what_is_no_kit_is_said(tmp_path: Path, kits: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="is no start-up kit"):
        open_kit(tmp_path)
    with pytest.raises(UserError, match="is no person's kit"), session(kits["clinic-a"]):
        pass
    with pytest.raises(UserError, match=r"site.toml is missing"):
        start(open_kit(kits["clinic-b"]))


def test_no_server_is_one_line(kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pf2lora.federation.flare.admin.ANSWER", 1.0)
    with (
        pytest.raises(UserError, match="no server answers at localhost:18200"),
        session(kits["lead@pf2lora.local"]),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[data]\nclients = ["a.jsonl"]', "model is missing"),
        ('model = "m"', "names no file"),
        ('model = "m"\nmodle = 1', "did you mean 'model'"),
        ('model = "m"\n[data]\nclients = ["a"]\ndataset = "sst2"', "unknown key 'dataset'"),
        ('model = "m"\n[data]\nclients = ["a"]\nvalidation_rate = 0.1', "did you mean 'validation_ratio'"),
        ('model = "m"\ndata = 3', "must be a table"),
    ],
)
def test_a_bad_site_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(UserError, match=line):
        read_site_file(tmp_path / "site.toml")


def test_an_engine_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "version", lambda name: "2.8.1")
    with pytest.raises(UserError, match=r"nvflare 2.8.1 is installed, but .* needs 2.9.x"):
        federation.require_nvflare()

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(federation, "version", missing)
    with pytest.raises(UserError, match=r"pip install 'pf2lora\[federation\]'"):
        federation.require_nvflare()


def test_commands_check_their_input_before_they_do_anything(tmp_path: Path, kits: dict[str, Path]) -> None:
    def refused(*args: str) -> str:
        result = CliRunner().invoke(app, args)
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    lead = str(kits["lead@pf2lora.local"])
    assert "--labels is missing" in refused("submit", "--kit", lead, "--sites", "a,b", "--rounds", "3")
    assert "two sites are called 'a'" in refused(
        "submit", "--kit", lead, "--sites", "a,a", "--labels", "x,y", "--rounds", "3"
    )
    assert "is no start-up kit" in refused("join", str(tmp_path))
    assert "no such config file" in refused("provision", str(tmp_path / "no.toml"))
    (tmp_path / "project.toml").write_text('name = "t"\nhost = "localhost"\nsites = ["a"]\n')
    made = CliRunner().invoke(
        app, ["provision", str(tmp_path / "project.toml"), "--out", str(tmp_path / "kits")]
    )
    assert made.exit_code == 0 and "a: " in made.output and "authority" in made.output


def test_every_class_that_a_kit_or_a_job_names_is_there(tmp_path: Path, kits: dict[str, Path]) -> None:
    """They are names in files: nothing else tells when a class has moved."""
    plan = make_plan("pf2lora")
    write_job(plan, SignedPlan(plan.to_json()), tmp_path)
    files = [
        *tmp_path.rglob("*.json"),
        *kits["server"].glob("local/*.json"),
        *kits["clinic-a"].glob("local/*.json"),
    ]
    named = {name for file in files for name in re.findall(r'"(pf2lora(?:\.\w+)+)"', file.read_text())}
    assert len(named) == 7
    for name in named:
        module, _, kind = name.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), kind), type), name


def test_the_protocol_names_no_flare() -> None:
    for file in Path(federation.__file__).parent.glob("protocol/*.py"):
        assert not re.search(r"(from|import) (nvflare|pf2lora\.federation\.flare)", file.read_text()), file


@pytest.mark.parametrize("module", ["resumer", "launcher", "admin", "provision", "processes"])
def test_main_processes_load_no_torch(module: str) -> None:
    """FLARE's main processes live as long as the machine; the model's are the jobs' processes."""
    line = f"import sys, pf2lora.federation.flare.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], check=False).returncode == 0
