"""A few broken files of every kind (`make fuzz`: a hundred thousand), the command line with some of them, and what is
read as it was written (hypothesis)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from little_world import command_line
from result_example import small, typed

from pf2lora.core.layout import Entry, Layout
from pf2lora.data.client import check_name, why_no_folder
from pf2lora.data.files import natural_order
from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.parsing import BadJSON, parse_json
from pf2lora.run import config as configs
from pf2lora.run import folder as run_folder
from pf2lora.run.result import from_json
from pf2lora.run.saved import flat

INPUTS = 12  # of each kind; always the same ones
quickly = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_broken_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    findings = [fuzz.try_input(name, number, tmp_path) for number in range(INPUTS)]
    assert [finding for finding in findings if finding] == []


def test_a_finding_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer itself: an exception, a line too much, a touched file and a long wait are all seen."""
    import time
    from dataclasses import replace

    def touch(path: Path) -> None:
        (path.parent / "new").write_text("")

    def fail(path: Path) -> None:
        raise KeyError(path)

    monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    for read, what in ((fail, "KeyError"), (touch, "touched"), (lambda path: time.sleep(1), "0.1 seconds")):
        monkeypatch.setitem(TARGETS, "bad", replace(TARGETS["site"], read=read))
        finding = fuzz.try_input("bad", 0, tmp_path)
        assert finding is not None and what in finding.what and "--target bad --input 0" in finding.again


COMMANDS = {
    "config": lambda f: ["train", f, "--model", "m", "--print-config"],
    "jsonl": lambda f: ["data", "show", "--clients", f],
    "parquet": lambda f: ["data", "show", "--clients", f],
    "squad": lambda f: ["data", "show", "--task", "question-answering", "--clients", f],
    "result": lambda f: ["report", f],
    "webnlg": lambda f: [
        "data",
        "show",
        "--task",
        "generation",
        "--dataset",
        "webnlg",
        "--data-dir",
        f.parents[1],
    ],
    "preset": lambda f: ["reproduce", "run", f],
}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "preset"])
def test_the_command_line_says_it_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = [n for n in range(12) if fuzz.refusal(name, n, tmp_path)][:4]
    assert numbers
    for number in numbers:
        fuzz.refusal(name, number, tmp_path)
        file = tmp_path / TARGETS[name].file
        before = fuzz.listed(tmp_path)
        code, out, err = command_line(monkeypatch, capsys, *COMMANDS[name](file))
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("pf2lora: ")
        assert fuzz.listed(tmp_path) == before


def test_a_real_process_says_it_in_one_line(tmp_path: Path) -> None:
    number = next(n for n in range(50) if fuzz.refusal("jsonl", n, tmp_path))
    fuzz.refusal("jsonl", number, tmp_path)
    command = [sys.executable, "-m", "pf2lora", "data", "show", "--clients", str(tmp_path / "a.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in done.stderr and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


# --- as it was written ------------------------------------------------------------------------------------


@quickly
@given(
    title=texts,
    name=texts,
    clients=st.lists(texts.filter(bool), max_size=4),
    rounds=st.integers(1, 2**62),
    lr=st.floats(1e-300, 1e300),
    client_lr=st.just("auto") | st.floats(0, 1e6),
    validation_ratio=st.floats(0, 0.9),
)
def test_a_config_is_the_same_after_toml(**given: Any) -> None:
    config = configs.from_settings({"model": given.pop("name")} | given)
    assert configs.from_dict(tomllib.loads(configs.to_toml(config))) == config


@quickly
@given(title=texts, label=texts, warnings=st.lists(texts, max_size=3), value=st.none() | st.floats(0, 1))
def test_a_result_is_the_same_after_json(title: str, label: str, warnings: list[str], value: Any) -> None:
    content = small(pf2lora=[0.5, 0.25])
    content["title"] = title
    content["methods"]["pf2lora"]["label"] = label
    content["methods"]["pf2lora"]["runs"][0]["warnings"] = warnings
    content["methods"]["pf2lora"]["runs"][1]["served"]["accuracy"]["per_client"] = [value, None]
    result = typed(content)
    assert from_json(json.loads(json.dumps(result.to_dict())), "again") == result


LAYOUT = Layout((Entry("q", "A", (2, 3)), Entry("q", "B", (3, 2))), 12)
numbers = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=12, max_size=12)


@quickly
@given(values=numbers)
def test_an_adapter_is_the_same_after_safetensors(values: list[float]) -> None:
    row = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(flat(LAYOUT, run_folder.named(LAYOUT, row), Path("file"))[0], row)


@quickly
@given(
    values=numbers,
    fields=st.dictionaries(
        texts, st.integers(-(2**53), 2**53) | st.booleans() | texts | st.none(), max_size=4
    ),
)
def test_a_message_is_the_same_after_the_wire(values: list[float], fields: dict[str, Any]) -> None:
    tensors = messages.to_tensors(LAYOUT, torch.tensor(values, dtype=torch.float32), None, torch.float32)
    message = messages.decode(messages.encode(fields, tensors))
    assert message.fields == fields and message.tensors.keys() == tensors.keys()
    assert all(torch.equal(message.tensors[name], tensors[name]) for name in tensors)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@quickly
@given(value=anything)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value
    assert parse_json(json.dumps(value).encode()) == value


@quickly
@given(text=st.text(max_size=60))
@example(text='{"a": 1, "a": 2}')
@example(text='"\\ud800"')
@example(text="9" * 5000)
def test_any_text_is_json_or_is_refused(text: str) -> None:
    try:
        value = parse_json(text)
    except BadJSON:
        return
    assert value == json.loads(text) or (isinstance(value, float) and math.isnan(value))


# --- names ------------------------------------------------------------------------------------------------

BAD_NAMES = (
    *(
        "",
        " ",
        ".",
        "..",
        "...",
        "a/b",
        "../a",
        "/a",
        "a\\b",
        "..\\a",
        "C:a",
        "a:b",
        "a\0b",
        "a\nb",
        "a\x1bb",
        "*",
    ),
    *(
        "a.",
        "a ",
        " a",
        "con",
        "NUL",
        "aux.txt",
        "COM1",
        "lpt9.x",
        "x" * 201,
        "ä" * 101,
        "a\u202eb",
        "\ud800",
        "a|b",
    ),
)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_leave_the_run_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a client"):
        check_name(name, "here")


@quickly
@given(name=st.text(max_size=40))
def test_a_name_that_is_taken_stays_below_its_folder(name: str) -> None:
    if not why_no_folder(name):
        place = Path("/run/clients") / name
        assert place.parent == Path("/run/clients") and place.name == name and "\0" not in name


@quickly
@given(names=st.lists(st.text(max_size=12) | st.integers(0, 10**20).map(str), max_size=8))
@example(names=["9" * 5000, "1"])
def test_any_names_have_an_order(names: list[str]) -> None:
    assert sorted(natural_order(names)) == sorted(set(names))
