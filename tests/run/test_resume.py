"""A run that was broken off goes on, and leaves the files of an unbroken one, to the last byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_runs import CLOCK_FIELDS, Killed, clocks_standing_still, contents, killed_at, same, unbroken
from little_world import World, make_world
from pinned_runs import OF_TASK, write_task

import pf2lora
from pf2lora.core.method import Loss, Method, State, StepStats
from pf2lora.engines import steps as engine_steps
from pf2lora.engines.batches import BatchSource
from pf2lora.methods import METHODS
from pf2lora.run import checkpoints, comparison, costs, trial
from pf2lora.run.checkpoints import Checkpoints
from pf2lora.run.costs import flops_of_step
from pf2lora.run.result import load_result

pytestmark = pytest.mark.usefixtures("one_thread", "sized_every_round")

SMALL: dict[str, Any] = {
    "rounds": 3,
    "steps": 2,
    "evaluate_every": 1,
    "validation_ratio": 0.2,
    "client_lr": "auto",
    "personal_steps": 2,
    "checkpoint_every": 1,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def still() -> Iterator[None]:
    with clocks_standing_still():
        yield


@pytest.fixture
def counted(still: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's operations are counted after all."""
    monkeypatch.setattr(costs, "flops_of_step", flops_of_step)


def breaks_and_goes_on(out: Path, settings: dict[str, Any], *at: int) -> None:
    """Broken off after the n-th line of metrics.jsonl, each time, it ends as an unbroken run."""
    expected = unbroken(out, settings)
    for call in at:
        with pytest.raises(Killed), killed_at(call):
            pf2lora.federate(**settings, out=out, resume=True)
        assert not (out / "report.html").exists()
    pf2lora.federate(**settings, out=out, resume=True)
    same(contents(out), expected)


@pytest.mark.no_cover
@pytest.mark.parametrize("method", [*METHODS.own, "alternating:Alternating"])
def test_every_method_goes_on_exactly(method: str, world: World, tmp_path: Path, resized: list[bool]) -> None:
    """Those whose clients find their sizes have found some on the way."""
    settings = world.settings(**SMALL, method=method, participation=0.67)
    breaks_and_goes_on(tmp_path / "run", settings, 2, 1)
    assert any(resized) == method.startswith("pf2lora")


@pytest.mark.no_cover
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("pf2lora", {"seeds": 2}),
        ("hetlora", {"seeds": 2, "clients_per_pass": 2}),
        ("centralized", {"seeds": 2}),
        ("pf2lora", {"patience": 1, "seeds": 2, "rounds": 5}),
        ("pf2lora", {"hypergradient_mode": "auto", "precision": "bfloat16", "dropout": 0.2}),
        ("pf2lora", {"validation_ratio": 0, "client_lr": 0.03, "head": "personal", "personal_steps": None}),
        ("homlora", {"keep": "last", "weighting": "size", "clients_per_pass": 1}),
        ("local", {"checkpoint_every": 2}),
        ("pf2lora", {"schedule": "cosine", "warmup": 0.3, "client_lr": 0.03, "participation": 0.67}),
    ],
)
def test_every_way_to_run_goes_on_exactly(
    method: str, changes: dict[str, Any], world: World, tmp_path: Path
) -> None:
    breaks_and_goes_on(tmp_path / "run", world.settings(**SMALL | {"method": method} | changes), 3)


@pytest.mark.no_cover
@pytest.mark.parametrize("task", ["question-answering", "generation"])
def test_every_task_goes_on_exactly(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # METEOR starts Java
    model, files = write_task(task, tmp_path)
    settings = SMALL | OF_TASK[task] | {"batch_size": 4, "rank": 4, "device": "cpu"}
    settings |= {"model": model, "clients": files, "task": task, "method": ["pf2lora", "homlora"]}
    breaks_and_goes_on(tmp_path / "run", settings, 2, 4)


def test_a_comparison_broken_off_after_every_round(world: World, tmp_path: Path) -> None:
    """Each time it does one round more; what has finished is not done again."""
    settings = world.settings(**SMALL, method=["pf2lora", "hetlora", "centralized"])
    breaks_and_goes_on(tmp_path / "run", settings, 2, 2, 2, 3, 2, 2)


def test_what_has_finished_is_not_run_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = world.settings(**SMALL, method=["homlora", "local"], out=tmp_path / "run")
    with pytest.raises(Killed), killed_at(4):
        pf2lora.federate(**settings)
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    assert list(first["methods"]) == ["homlora"]  # written when it had finished
    trained: list[str] = []
    original = comparison.run_together

    def noted(workload: Any, asked: str, *rest: Any) -> Any:
        trained.append(asked)
        return original(workload, asked, *rest)

    monkeypatch.setattr(comparison, "run_together", noted)
    result = pf2lora.federate(**settings, resume=True)
    assert trained == ["local"] and list(result.methods) == ["homlora", "local"]
    again = pf2lora.federate(**settings, resume=True)
    assert trained == ["local"] and again == result


def test_broken_off_before_the_first_checkpoint_it_begins_again(world: World, tmp_path: Path) -> None:
    breaks_and_goes_on(tmp_path / "run", world.settings(**SMALL | {"checkpoint_every": 0}), 1, 2)


@pytest.mark.parametrize(
    ("owner", "name", "call", "after"),
    [
        (comparison.Checkpoints, "finish", 1, False),
        (comparison.Checkpoints, "finish", 1, True),
        (comparison.Checkpoints, "remove", 1, False),
        (trial, "finish", 1, True),
        (trial, "outcomes", 1, True),
    ],
)
def test_broken_off_near_a_methods_end(
    owner: Any, name: str, call: int, after: bool, world: World, tmp_path: Path
) -> None:
    settings, out = world.settings(**SMALL, method=["local", "homlora"]), tmp_path / "run"
    expected = unbroken(out, settings)
    with pytest.raises(Killed), killed_at(call, owner, name, after=after):
        pf2lora.federate(**settings, out=out)
    pf2lora.federate(**settings, out=out, resume=True)
    same(contents(out), expected)


def test_a_run_with_a_bad_client_goes_on_exactly(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was left out, what its updates are held against, and its state are the unbroken run's."""
    honest = engine_steps.local_steps

    def broken(
        method: Method, F: Loss, state: State, source: BatchSource, *, clients: list[int], **more: Any
    ) -> tuple[State, StepStats]:
        state, stats = honest(method, F, state, source, clients=clients, **more)
        for column, (i, done) in enumerate(zip(clients, more["first_step"])):
            if source.names[i] == "south" and done == SMALL["steps"]:
                stats.loss[1, column] = torch.nan
        return state, stats

    monkeypatch.setattr(engine_steps, "local_steps", broken)
    settings = world.settings(**SMALL | {"rounds": 4}, method="pf2lora")
    breaks_and_goes_on(tmp_path / "run", settings, 1, 1, 1)
    rounds = load_result(tmp_path / "run").methods["pf2lora"].runs[0].rounds
    assert [list(r.left_out) for r in rounds] == [[], ["south"], [], []]


def test_what_a_kill_left_while_the_run_cleared_up_goes(world: World, tmp_path: Path) -> None:
    settings = world.settings(**SMALL, method="homlora", out=tmp_path / "run")
    pf2lora.federate(**settings)
    ended = contents(tmp_path / "run")
    for left in ("finished/homlora-0.json", "000003/shared.safetensors"):  # its manifest went first
        (tmp_path / "run" / "checkpoints" / left).parent.mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / left).write_text("{}")
    pf2lora.federate(**settings, resume=True)
    same(contents(tmp_path / "run"), ended)


def test_a_method_that_failed_is_not_tried_again(world: World, tmp_path: Path) -> None:
    """Its lines in metrics.jsonl are there once, and the result says why it failed."""
    settings = world.settings(**SMALL, method=["homlora", "local"], methods={"homlora": {"lr": 1e30}})
    breaks_and_goes_on(tmp_path / "run", settings | {"rounds": 4}, 2)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["methods"]["homlora"]["failed"]


def test_more_rounds_are_those_of_a_longer_run(world: World, tmp_path: Path) -> None:
    out, longer = tmp_path / "run", world.settings(**SMALL | {"rounds": 5})
    expected = unbroken(out, longer)
    with pytest.raises(Killed), killed_at(3):
        pf2lora.federate(**longer | {"rounds": 4}, out=out)
    pf2lora.federate(**longer, out=out, resume=True)
    same(contents(out), expected)


def test_a_comparison_may_get_further_methods(world: World, tmp_path: Path) -> None:
    out, more = tmp_path / "run", world.settings(**SMALL, method=["homlora", "local", "hetlora"])
    expected = unbroken(out, more)
    with pytest.raises(Killed), killed_at(5):
        pf2lora.federate(**more | {"method": ["homlora", "local"]}, out=out)
    pf2lora.federate(**more, out=out, resume=True)
    same(contents(out), expected)


def test_clocks_are_all_that_differs_and_are_summed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clocks that tell the time of the part, times of rounds before the interruption are what they were."""
    ticks = iter(range(10_000))
    clock = type(
        "Clock", (), {"perf_counter": lambda: float(next(ticks)), "time": lambda: float(next(ticks))}
    )
    for module in ("pf2lora.engines.local.time", "pf2lora.run.trial.time", "pf2lora.run.folder.time"):
        monkeypatch.setattr(module, clock)
    monkeypatch.setattr("pf2lora.engines.stopwatch.time", type("Still", (), {"perf_counter": lambda: 0.0}))
    settings, out = world.settings(**SMALL), tmp_path / "run"
    expected = json.loads(unbroken(out, settings)["result.json"])
    with pytest.raises(Killed), killed_at(2):
        pf2lora.federate(**settings, out=out)
    first = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    pf2lora.federate(**settings, out=out, resume=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == first[0] and len(lines) == 3
    found = json.loads((out / "result.json").read_text())
    (run,) = found["methods"]["pf2lora"]["runs"]
    assert [r["seconds"] for r in run["rounds"]] == [line["seconds"] for line in lines]
    assert run["seconds"] == sum(line["seconds"] for line in lines) == 3
    assert run["evaluation_seconds"] == 3
    assert without_clocks(found) == without_clocks(expected)


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if k not in CLOCK_FIELDS}
    return [without_clocks(v) for v in value] if isinstance(value, list) else value


# --- when ---------------------------------------------------------------------------------------------------


def test_checkpoints_cost_a_share_of_the_time_and_never_come_early(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that takes 1 s comes every 50 s, one that takes none every 10 s."""
    now, cost, saved = [0.0], [1.0], list[float]()
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])

    def save(self: Checkpoints, about: Any, files: Any) -> None:
        if about["begun"]:
            saved.append(now[0])
        now[0] += cost[0]

    monkeypatch.setattr(Checkpoints, "save", save)
    original = Checkpoints.after_round

    def after_round(self: Checkpoints, *args: Any) -> None:
        now[0] += 4
        original(self, *args)

    monkeypatch.setattr(Checkpoints, "after_round", after_round)
    settings = world.settings(rounds=40, steps=1, evaluate_every=40, method="local")
    pf2lora.federate(**settings, out=tmp_path / "dear")
    assert saved[0] == 12 and [b - a for a, b in pairwise(saved)] == [53, 53]
    saved.clear()
    now[0], cost[0] = 0.0, 0.0
    pf2lora.federate(**settings, out=tmp_path / "cheap")
    assert [b - a for a, b in pairwise(saved)] == [12] * (len(saved) - 1) and len(saved) == 13


def test_as_many_checkpoints_are_kept_as_asked_for(world: World, tmp_path: Path) -> None:
    for keep in (1, 2, 3):
        out = tmp_path / str(keep)
        with pytest.raises(Killed), killed_at(5):
            pf2lora.federate(**world.settings(**SMALL | {"rounds": 6}, keep_checkpoints=keep, out=out))
        names = [p.name for p in sorted((out / "checkpoints").iterdir())]
        assert names == ["000001", "000002", "000003", "000004"][-keep:]
