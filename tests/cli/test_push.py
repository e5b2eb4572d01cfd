"""`pf2lora push` against a hub of our own: four files arrive, with nothing of a machine or of a client's texts."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from little_world import FAST, SECRETS, World, command_line, make_world

import pf2lora

REPO = "clinics/north-adapter"


class Hub:
    """As much of the hub as an upload needs; it keeps what it was told."""

    def __init__(self, answer: int = 200) -> None:
        self.answer = answer
        self.files: dict[str, bytes] = {}
        self.repository: dict[str, Any] = {}
        self.tokens: set[str | None] = set()


@contextmanager
def hub_answering(answer: int = 200) -> Iterator[tuple[Hub, str]]:
    hub = Hub(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization"))
            if hub.answer != 200:
                return self.reply({"error": "no"}, hub.answer)
            if self.path == "/api/repos/create":
                hub.repository = json.loads(body)
                return self.reply({"url": f"{address}/{REPO}", "name": REPO, "id": "1"})
            if "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
                return self.reply({"files": modes})
            if "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                done = {
                    "commitUrl": f"{address}/{REPO}/commit/0",
                    "commitOid": "0" * 40,
                    "hookOutput": "",
                    "success": True,
                }
                return self.reply(done)
            return self.reply({"errors": [], "warnings": []})  # of the card's head

        def do_GET(self) -> None:
            self.reply({"id": REPO, "sha": "0" * 40, "siblings": []})

        def reply(self, content: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub, address
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("push"))
    pf2lora.federate(**world.settings(**FAST | {"rounds": 1}, out=world.root / "run"))
    return world


@pytest.fixture
def push(world: World, monkeypatch: Any, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """`pf2lora push` of the world's run to a hub at an address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def run(address: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", address
        )  # which it read when it was imported
        return command_line(monkeypatch, capsys, "push", world.root / "run", "--to", REPO, *words)

    return run


def test_four_files_arrive_with_nothing_of_this_machine_in_them(world: World, push: Any) -> None:
    with hub_answering() as (hub, address):
        words = ("--client", "north", "--base", "the/base", "--license", "apache-2.0", "--yes")
        code, out, error = push(address, *words)
    assert code == 0, error
    assert out.strip() == f"{address}/{REPO}" and "as a private repository" in error
    assert "private" in (hub.repository.get("visibility"), hub.repository.get("private") and "private")
    assert hub.tokens == {"Bearer hf_secret"} and hub.repository["name"] == "north-adapter"
    assert sorted(hub.files) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
    ]
    adapter = world.root / "run" / "clients" / "north"
    assert hub.files["adapter_model.safetensors"] == (adapter / "adapter_model.safetensors").read_bytes()
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "the/base"
    card = hub.files["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "apache-2.0" and head["base_model"] == "the/base"
    assert f'folder = "{REPO}"' in card and "No licence" not in card
    for name, content in hub.files.items():
        assert str(world.root).encode() not in content, name
        assert not [secret for secret in SECRETS.values() if secret.encode() in content], name


def test_a_hub_that_refuses_or_is_not_there_is_one_line(world: World, push: Any) -> None:
    words = ("--client", "north", "--base", "the/base", "--yes")
    with hub_answering(401) as (hub, address):
        code, _, error = push(address, *words)
    assert code == 2 and hub.files == {}
    assert "not logged in, or no right to write there" in error
    code, _, error = push("http://127.0.0.1:9", *words)
    assert code == 2 and "nothing was published" in error and "hf_secret" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--client", "north", "--base", "the/base"], "--yes says that this is meant"),
        (["--client", "north", "--yes"], "a folder of this machine"),
        (["--client", "nort", "--yes"], "has no client 'nort'; its clients: north, south, west"),
        (["--method", "homlora", "--yes"], "unknown method of this run 'homlora'"),
    ],
)
def test_what_is_not_meant_or_not_there_is_not_published(
    words: list[str], said: str, world: World, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("pf2lora.run.publish.upload", lambda *a, **k: pytest.fail("it was published"))
    code, _, error = command_line(monkeypatch, capsys, "push", world.root / "run", "--to", REPO, *words)
    assert code == 2 and said in error


def test_a_repository_has_an_owner(world: World, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    code, _, error = command_line(monkeypatch, capsys, "push", world.root / "run", "--to", "north")
    assert code == 2 and "owner/name" in error
    code, _, error = command_line(monkeypatch, capsys, "push", tmp_path, "--to", REPO)
    assert code == 2 and "no config.toml" in error
