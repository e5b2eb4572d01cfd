"""What is in deploy/: units that systemd takes, a compose file and alerts that name what there is."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from pf2lora import cli
from pf2lora.federation.protocol.metrics import OF_A_RUN, Participant, address, exposition

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PROGRAM = "/opt/pf2lora/bin/pf2lora"
MOST_EXPOSED = 2.0  # of 10, as `systemd-analyze security` counts


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line makes of a command's arguments; an exception if there is no such command or option."""
    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    return dict(command.make_context("pf2lora", words).params)


def unit(file: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string(file.read_text(encoding="utf8"))
    return found


def test_there_is_a_unit_for_the_server_and_one_for_a_site() -> None:
    assert [file.name for file in UNITS] == ["pf2lora-server.service", "pf2lora-site.service"]


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_a_unit_starts_a_participant_on_boot_and_after_a_crash(file: Path) -> None:
    service = unit(file)["Service"]
    program, *words = shlex.split(service["ExecStart"])
    found = parsed(words)
    assert program == PROGRAM and words[:2] == ["federation", "join"]
    assert str(found["kit"]).startswith("/var/lib/" + service["StateDirectory"])
    assert found["log"] == "json" and address(found["metrics"])[0] == "127.0.0.1"
    assert service["Restart"] == "always" and unit(file)["Install"]["WantedBy"] == "multi-user.target"
    assert service["User"] != "root" and service["UMask"] == "0077" and service["LimitCORE"] == "0"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_systemd_takes_a_unit_and_finds_it_hardened(file: Path, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf8")
    copy = tmp_path / file.name
    copy.write_text(text.replace(PROGRAM, "/bin/true"), encoding="utf8")  # it must be there to be verified
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and file.name not in done.stderr, done.stderr
    looked = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(copy)]
    said = subprocess.run(looked, capture_output=True, text=True, check=False).stdout
    level = re.search(rf"exposure level for {re.escape(file.name)}: ([0-9.]+)", said)
    if level is None:
        pytest.skip("this systemd-analyze looks at no file that is not installed")
    assert float(level[1]) <= MOST_EXPOSED, said


def test_a_mistyped_option_in_a_unit_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["federation", "join", "kit", "--metric", "1"])


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf8"))["services"]
    return found


@pytest.mark.parametrize("name", ["server", "site", "site-gpu"])
def test_a_container_starts_a_participant_and_can_do_little_else(name: str) -> None:
    service = services()[name]
    found = parsed(shlex.split(service["command"]))
    assert str(found["kit"]) == "/kit" and address(found["metrics"]) == ("0.0.0.0", 9464)
    assert service["restart"] == "unless-stopped" and service["profiles"] == [name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    opened = [port for port in service["ports"] if not port.startswith("127.0.0.1:")]
    assert opened == (["8002:8002"] if name == "server" else [])
    written = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert written == ["./kit:/kit", *([] if name == "server" else ["./state:/state"])]


def test_the_image_of_the_services_can_do_what_runs_ask_of_them() -> None:
    """Any run that a lead can submit, one with differential privacy included."""
    (extras,) = re.findall(
        r'pip install [^\n]*"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text(encoding="utf8")
    )
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    assert {"federation", "privacy"} <= set(extras.split(",")) <= set(declared["optional-dependencies"])


def test_only_the_service_with_a_gpu_asks_for_one() -> None:
    asking = [name for name, service in services().items() if "deploy" in service]
    assert asking == ["site-gpu"]
    (device,) = services()["site-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_alerts_name_figures_that_there_are(tmp_path: Path) -> None:
    alerts = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text(encoding="utf8"))
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    known = {f"pf2lora_{name}" for name, *_ in OF_A_RUN} | {"pf2lora_run_state"}
    known |= set(re.findall(r"^# TYPE (\w+)", exposition(Participant(tmp_path, "server", True, 0.0)), re.M))
    named = {name for rule in rules for name in re.findall(r"\bpf2lora_\w+", rule["expr"])}
    assert len(rules) == 5 and named and named <= known


def test_the_page_for_operators_names_each_file() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf8")
    assert [file.name for file in DEPLOY.iterdir() if f"deploy/{file.name}" not in page] == []
