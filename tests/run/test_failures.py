"""A bad client does not cost a run and a failed method not a comparison: both are named where people look."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, command_line, make_world

import pf2lora
from pf2lora.core.method import State, StepStats
from pf2lora.engines import steps as engine_steps
from pf2lora.engines.bad_clients import Diverged
from pf2lora.report import render
from pf2lora.run import comparison
from pf2lora.run.result import Result, load_result

REASON = "its loss became nan in local step 2"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def south_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three clients has no loss in the second step of round 1."""
    honest = engine_steps.local_steps

    def broken(
        *what: Any, clients: Sequence[int], first_step: Sequence[int], **more: Any
    ) -> tuple[State, StepStats]:
        state, stats = honest(*what, clients=clients, first_step=first_step, **more)
        for column, (i, done) in enumerate(zip(clients, first_step)):
            if i == 1 and done == 0:
                stats.loss[1, column] = torch.nan
        return state, stats

    monkeypatch.setattr(engine_steps, "local_steps", broken)


@pytest.mark.usefixtures("south_breaks")
@pytest.mark.parametrize("method", ["pf2lora", "hetlora", "local"])
def test_a_bad_client_is_named_everywhere_and_the_run_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, method: str
) -> None:
    out = tmp_path / "run"
    code, printed, _ = command_line(
        monkeypatch, capsys, "train", *world.base, "--method", method, "--seeds", 2, "--out", out
    )
    assert code == 0
    label = load_result(out).methods[method].label
    assert f"{label}, seed 0: round 1 leaves client 'south' out: {REASON}" in printed
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = [(line["seed"], line["round"], line["left_out"]) for line in lines]
    assert told == [(0, 1, {"south": REASON}), (1, 1, {}), (0, 2, {}), (1, 2, {})]
    first, second = load_result(out).methods[method].runs
    assert first.rounds[0].left_out == {"south": REASON} and second.rounds[0].left_out == {}
    assert first.rounds[0].train_loss[1] is None and first.rounds[1].train_loss[1] is not None
    warning = f"client 'south' was left out of 1 of 2 rounds, first of round 1: {REASON}"
    assert warning in first.warnings and warning not in second.warnings
    page = (out / "report.html").read_text()
    assert "was left out of 1 of 2 rounds" in page
    assert (out / "clients" / "south" / "adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("south_breaks")
@pytest.mark.parametrize("flags", [["--strict"], ["--max-bad-clients", 0]])
def test_a_run_can_be_told_to_stop(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[Any]
) -> None:
    code, _, error = command_line(
        monkeypatch, capsys, "train", *world.base, *flags, "--out", tmp_path / "run"
    )
    (line,) = error.splitlines()
    assert code == 2 and f"client 'south' is bad in round 1: {REASON}; a smaller lr" in line
    assert (tmp_path / "run" / "result.json").exists() == (flags != ["--strict"])


def test_a_failed_method_does_not_cost_the_others(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "run"
    code, printed, error = command_line(
        *(monkeypatch, capsys, "compare", *world.base, "--method", "homlora", "pf2lora", "local"),
        *("--client-lr", "1e9", "--out", out),
    )
    (line,) = error.splitlines()
    assert code == 2 and line.startswith("pf2lora: PF2LoRA failed: client 'north' is bad in round ")
    assert "and 2 more of 3 clients; a smaller lr or client_lr usually helps" in line
    result = load_result(out)
    assert {name: len(method.runs) for name, method in result.methods.items()} == {
        "homlora": 1,
        "pf2lora": 0,
        "local": 1,
    }
    assert list(result.failed) == ["pf2lora"] and "is bad in round " in result.failed["pf2lora"]
    assert result.methods["homlora"].failed is None and result.served(method="local").mean is not None
    assert "failed PF2LoRA: client 'north'" in " ".join(printed.split())
    page = (out / "report.html").read_text()
    assert "PF2LoRA failed: client &#39;north&#39; is bad" in page and "HOMLoRA" in page
    assert sorted(p.name for p in (out / "methods").iterdir()) == ["homlora", "local"]
    rows = {row["method"]: row for row in result.table().reset_index().to_dict("records")}
    assert "bad in round " in rows["pf2lora"]["failed"] and rows["local"]["failed"] == ""
    assert "PF2LoRA · b failed" in render([result, result], ["a", "b"])


def test_where_every_method_fails_the_result_says_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "run"
    code, _, error = command_line(
        *(monkeypatch, capsys, "compare", *world.base, "--method", "pf2lora", "pf2lora-joint"),
        *("--client-lr", "1e9", "--out", out),
    )
    assert code == 2
    assert [line.split(" failed: ")[0] for line in error.splitlines()] == [
        "pf2lora: PF2LoRA",
        "pf2lora: PF2LoRA without bilevel",
    ]
    result = load_result(out)
    assert len(result.failed) == 2 and result.point == "deploy"
    page = (out / "report.html").read_text()
    assert page.count('class="alert"') == 2 and 'data-view="curves"' not in page


def test_from_python_a_run_of_nothing_but_failures_is_an_error(world: World, tmp_path: Path) -> None:
    settings = world.settings(client_lr=1e9)
    with pytest.raises(Diverged, match="PF2LoRA: client 'north' is bad in round "):
        pf2lora.federate(**settings, method="pf2lora", out=tmp_path / "one")
    assert load_result(tmp_path / "one").failed
    result = pf2lora.federate(**settings, method=["pf2lora", "homlora"])
    assert list(result.failed) == ["pf2lora"] and result.served(method="homlora").mean is not None
    with pytest.raises(Diverged, match="client 'north' is bad"):
        pf2lora.federate(**settings, method=["pf2lora", "homlora"], strict=True)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: not enough memory: you tried"),
    ],
)
def test_a_method_that_finds_no_memory_has_failed(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    honest = comparison.set_up

    def set_up(workload: Any, name: str, *seeds: int, **options: Any) -> Any:
        if name == "homlora" and options.get("compiled", True):
            raise error
        return honest(workload, name, *seeds, **options)

    monkeypatch.setattr(comparison, "set_up", set_up)
    result: Result = pf2lora.federate(**world.settings(), method=["homlora", "local"])
    assert "more memory than there is" in result.failed["homlora"] and len(result.methods["local"].runs) == 1


def test_a_mistake_of_ours_is_no_failed_method(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(comparison, "run_together", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        pf2lora.federate(**world.settings(), method=["homlora", "local"])
