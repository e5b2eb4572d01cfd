"""`pf2lora serve` at a command line: what it says, what it refuses, how it ends; and tokens' files."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from little_world import command_line

from pf2lora.errors import UserError
from pf2lora.serve.access import Access, is_loopback, one_token, read_token_file, read_tokens
from pf2lora.serve.server import make_server
from pf2lora.serve.service import Limits

LONG = "0123456789abcdef"


def test_a_server_leaves_other_handlers_of_its_process_alone() -> None:
    """uvicorn's own way to set up logging closes every handler there is, of which absl's then closes its stream."""
    closed = []

    class Handler(logging.Handler):
        def close(self) -> None:
            closed.append(self)
            super().close()

    handler = Handler()
    make_server(FastAPI(), Limits())
    assert not closed
    handler.close()


def test_a_stranger_serves_a_run_from_another_folder_and_stops_it(
    generation_run: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "token"
    tokens.write_text(LONG + "\n")
    command = [sys.executable, "-m", "pf2lora", "serve", os.path.relpath(generation_run, tmp_path)]
    flags = ["--port", "0", "--device", "cpu", "--token-file", "token", "--batch", "1"]
    server = subprocess.Popen(
        [*command, *flags], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        body = json.dumps({"model": "north", "prompt": "soup", "max_tokens": 3}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {LONG}"}
        request = urllib.request.Request(f"{address}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["choices"][0]["finish_reason"] in ("length", "stop")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/v1/nobody-asks%0athis", timeout=30)
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=LONG, max_retries=0, timeout=30)
        asked: Any = {"model": "base", "prompt": ["soup"] * 9, "max_tokens": 90, "temperature": 2}
        ends: list[str | None] = []
        for chunk in client.completions.create(**asked, stream=True):
            if not ends:
                server.send_signal(signal.SIGTERM)  # what runs is finished
            ends.append(chunk.choices[0].finish_reason)
        assert len([end for end in ends if end]) == 9
        _, said = server.communicate(timeout=30)
    finally:
        server.kill()
    lines = said.splitlines()
    assert server.returncode == 0 and lines[-1] == "stopped", said
    assert lines[0] == "models: common, north, south, west, base" and lines[2].startswith("a run of prompts")
    told = [line.split(" ", 2)[2] for line in lines[3:-1]]  # without date and time
    assert re.sub(r"\d\.\d\d", "…", "; ".join(told)) == (
        "token POST /v1/completions north 200 … s; - GET /v1/nobody-asks%0athis - 404 … s; "
        "token POST /v1/completions base 200 … s"
    )
    assert LONG not in said and "soup" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets others in: give --token-file"),
        (["--host", "::"], "lets others in"),
        (["--token-file", "a", "--tokens", "b"], "give --token-file or --tokens, not both"),
        (["--token-file", "nowhere"], "nowhere: no such token file"),
        (["--tls-cert", "a"], "--tls-cert and --tls-key belong together"),
        (["--tls-cert", "nowhere", "--tls-key", "nowhere"], "nowhere: no such file"),
        (["--host", "127.0.0.1", "--port", "TAKEN"], "Address already in use"),
        (
            ["--host", "no.such.host.invalid", "--token-file", "TOKEN"],
            "cannot listen on no.such.host.invalid",
        ),
        (["--method", "homlora", "--port", "0"], "has no method 'homlora'"),
        (["--tokens", "EMPTY", "--port", "0"], "no tokens; a table for each holder"),
        (["--tokens", "MISSPELT", "--port", "0"], "[nroth]: unknown model 'nroth'; did you mean 'north'?"),
        (["--max-length", "9999", "--port", "0"], "--max-length is 9999, but the model takes 128 tokens"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    flags: list[str],
    message: str,
    generation_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    import socket

    monkeypatch.delenv("PF2LORA_SERVE_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TOKEN").write_text(LONG)
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "MISSPELT").write_text(f'[nroth]\ntoken = "{LONG}"')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [str(taken.getsockname()[1]) if flag == "TAKEN" else flag for flag in flags]
        code, out, err = command_line(monkeypatch, capsys, "serve", generation_run, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err, err


def test_a_missing_extra_is_named(generation_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = command_line(monkeypatch, capsys, "serve", generation_run)
    assert code == 2 and "'pf2lora serve' needs the package 'uvicorn': pip install 'pf2lora[serve]'" in err


def test_a_wrong_folder_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = command_line(monkeypatch, capsys, "serve", tmp_path)
    assert code == 2 and "is no run folder" in err


# --- files of tokens -----------------------------------------------------------------------------------------


def tokens_file(folder: Path, text: str) -> Path:
    file = folder / "tokens.toml"
    file.write_text(text)
    return file


def test_whose_token_opens_what(tmp_path: Path) -> None:
    served = ["common", "north", "south", "base"]
    text = (
        f'[north]\ntoken = "{LONG}1"\n[tester]\ntoken = "{LONG}2"\nmodels = ["south"]\n'
        f'[lead]\ntoken = "{LONG}3"\nmodels = ["*"]\n'
    )
    access = read_tokens(tokens_file(tmp_path, text), served, ["common", "base"])

    def opens(token: str) -> list[str]:
        holder = access.holder(f"Bearer {token}")
        return [name for name in served if holder and holder.may_use(name)]

    assert opens(f"{LONG}1") == ["common", "north", "base"]
    assert opens(f"{LONG}2") == ["south"] and opens(f"{LONG}3") == served
    assert opens(LONG) == [] and access.holder(None) is None and access.holder(f"bearer {LONG}1")
    assert LONG not in repr(access.holders)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tokens"),
        ("north = 3", r"\[north\] must be a table with a token"),
        ("[north]\ntoken = 3", r"\[north\] must be a table with a token"),
        ('[north]\ntoken = "short"', "16 characters or more"),
        (f'[north]\ntoken = "{LONG} {LONG}"', "one word of ASCII"),
        (f'[nroth]\ntoken = "{LONG}"', "did you mean 'north'"),
        (f'[north]\ntoken = "{LONG}"\nmodels = ["nroth"]', "did you mean 'north'"),
        (f'[north]\ntoken = "{LONG}"\nmodels = "north"', "must be a list of names"),
        (f'[north]\ntoken = "{LONG}"\nmodel = ["north"]', "it takes token and models"),
        (f'[north]\ntoken = "{LONG}"\n[common]\ntoken = "{LONG}"', r"the same token as \[north\]"),
        ("[north", "not valid TOML"),
    ],
)
def test_bad_files_of_tokens(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_tokens(tokens_file(tmp_path, text), ["common", "north"])
    assert LONG not in str(error.value)


def test_one_token_for_all(tmp_path: Path) -> None:
    file = tokens_file(tmp_path, f"{LONG}\n")
    for access in (read_token_file(file), one_token(f" {LONG}\n", "the environment")):
        holder = access.holder(f"Bearer {LONG}")
        assert holder and holder.may_use("anything") and access.holder(f"Bearer {LONG}x") is None
    with pytest.raises(UserError, match="16 characters or more"):
        read_token_file(tokens_file(tmp_path, "\n"))
    assert Access().holder(None), "without tokens, whoever reaches the server"


def test_what_is_this_machine_alone() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(
        map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "", "example.org", "localhost.example.org"])
    )
