"""`pf2lora methods`: every method with its line, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from little_world import command_line

from pf2lora.methods import METHODS, SETS

ROOT = Path(__file__).parents[2]


def test_every_method_has_its_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, _ = command_line(monkeypatch, capsys, "methods")
    assert code == 0
    for name in METHODS:
        (line,) = re.findall(rf"^{name} .*$", out, flags=re.MULTILINE)
        assert METHODS[name].summary in line and METHODS[name].personal_part in line
    for name, members in SETS.items():
        assert f"{name}: {', '.join(members)}" in " ".join(out.split())


def test_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, _ = command_line(monkeypatch, capsys, "methods", "personal", "--json")
    found = json.loads(out)
    assert code == 0 and [method["name"] for method in found] == list(SETS["personal"])
    by_name = {method["name"]: method for method in found}
    assert by_name["ditto"]["parameters"] == ["lr", "weight_decay", "optimizer", "penalty", "rank"]
    assert by_name["local"]["sets"] == ["paper", "personal"] and by_name["local"]["sent"] == "nothing"
    code, _, error = command_line(monkeypatch, capsys, "methods", "fedavg")
    assert code == 2 and error.strip() == "pf2lora: unknown method 'fedavg'; here that is homlora"


@pytest.mark.parametrize("name", METHODS.own)
def test_a_method_says_what_it_is(name: str) -> None:
    """In its class for lists, and in the README's table."""
    kind = METHODS[name]
    assert kind.summary and len(kind.summary) < 90 and kind.sent_part and kind.personal_part
    table = (ROOT / "README.md").read_text(encoding="utf8")
    assert re.search(rf"^\| .*`{name}`.* \|$", table, flags=re.MULTILINE), "its row in the README"
