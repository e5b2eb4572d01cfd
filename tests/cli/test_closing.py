"""The last lines of a run: advice that follows from what can be told apart, commands that work."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from little_world import World, command_line, make_world, sentences, write_jsonl
from result_example import make_result, typed

from pf2lora.cli.closing import closing
from pf2lora.report import advice as module
from pf2lora.report.advice import advice
from pf2lora.run.result import Baseline, OverClients


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_the_commands_that_are_shown_work(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("rows.jsonl"), sentences(6, seed=5))
    args = ["compare", *world.base, "--method", "homlora", "local", "--out", "my runs"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0
    commands = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  pf2lora ")]
    assert [words[0] for words in commands] == ["predict", "evaluate", "export"]
    for words in commands:
        code, _, err = command_line(monkeypatch, capsys, *words)
        assert code == 0, (words, err)
    (line,) = [line for line in out.splitlines() if line.startswith("Each client's adapter")]
    folder = Path(line.partition(": ")[2].removesuffix(" (a PEFT folder)").replace("NAME", "west"))
    assert (folder / "adapter_config.json").is_file()


def test_what_cannot_be_told_apart_is_said_to_be_as_good(monkeypatch: Any) -> None:
    result = typed(make_result())
    names = [name for name in result.methods if name != "centralized"]
    assert advice(result, names[0], []) == f"{result.methods[names[0]].label}."
    line = advice(result, "pf2lora", ["homlora", "local"])
    assert line.startswith("PF2LoRA, the highest score; as far as these test rows tell, HOMLoRA and Local")
    assert line.endswith("would do as well, and Local sends nothing.")
    assert "sends" not in advice(result, "local", ["homlora"])
    alike = replace(result, methods=result.methods | {"homlora": result.methods["pf2lora"]})
    assert "highest" not in advice(alike, "pf2lora", ["homlora"])
    monkeypatch.setattr(
        module, "best", lambda result: ["centralized", "pf2lora"]
    )  # a bound: nobody can deploy it
    lines = closing(result, Path("runs/x"))
    assert lines[0] == "What to deploy: PF2LoRA." and "runs/x/methods/pf2lora/clients/NAME" in lines[1]
    high = OverClients([1.0] * len(result.clients), 1.0, 1.0, 0.0)
    unbeaten = {"trivial": Baseline("majority label", {result.metric: high})}
    (doubt,) = set(closing(replace(result, baselines=unbeaten), Path("runs/x"))) - set(lines)
    assert doubt.endswith("the model is no better than the majority label: not ready to be used there.")
    monkeypatch.setattr(module, "best", lambda result: [])  # all failed
    assert closing(result, Path("runs/x")) == []
