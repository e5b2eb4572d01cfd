"""Runs with validation rows and without: what is said, when a run stops early, seeds side by side, memory that ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import FAST, LEARNING, World, command_line, flags, make_world, sentences, write_jsonl

import pf2lora
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.errors import UserError
from pf2lora.run import comparison, trial
from pf2lora.run.comparison import Watcher, compare, prepare, run_together
from pf2lora.run.config import from_settings
from pf2lora.run.result import RoundRecord, SeedRun, load_result
from pf2lora.run.warnings import training_warnings
from pf2lora.run.watched import Stopper

VALIDATED: dict[str, Any] = {"validation_ratio": 0.2, "client_lr": "auto"}
OWN_COSTS = (
    "seconds",
    "evaluation_seconds",
    "resize_seconds",
    "peak_memory_bytes",
)  # of a machine, not of the numbers


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def noted(world: World, **changes: Any) -> tuple[list[str], dict[str, list[SeedRun]]]:
    """What a run says while it goes on, and its runs by method; of a rate that is given it says nothing."""
    lines: list[str] = []
    result = compare(from_settings(world.settings(lr=1e-3, **changes)), Watcher(on_note=lines.append))
    return lines, {name: method.runs for name, method in result.methods.items()}


# ---- without validation rows ----

OFF = "no validation rows: what is served after the last round is deployed"


def test_without_validation_rows_one_line_says_what_that_switches_off(world: World) -> None:
    lines, _ = noted(world, method=["pf2lora", "homlora"], seeds=2, rounds=1, client_lr="auto")
    assert lines == [f"{OFF}, and --client-lr auto is 0.03"]
    assert noted(world, method=["pf2lora"], rounds=1)[0] == [OFF]  # a rate was given
    assert noted(world, method=["homlora"], rounds=1, client_lr="auto")[0] == [OFF]
    assert noted(world, rounds=1, **VALIDATED)[0] == []


def test_without_validation_rows_auto_is_the_fixed_rate(world: World) -> None:
    auto, fixed = (
        noted(world, client_lr=rate, client_bias=False, rounds=2)[1]["pf2lora"][0] for rate in ("auto", 0.03)
    )
    assert [r.train_loss for r in auto.rounds] == [r.train_loss for r in fixed.rounds]
    assert auto.served == fixed.served and auto.deploy is None


@pytest.mark.parametrize(
    ("flag", "setting"), [("--patience 2", {"patience": 2}), ("--personal-steps 5", {"personal_steps": 5})]
)
def test_what_is_judged_on_validation_rows_needs_them(
    flag: str, setting: dict[str, int], world: World, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        pf2lora.federate(**world.settings(out=tmp_path / "run", **setting))
    assert str(caught.value) == (f"{flag} is judged on validation rows, and --validation-ratio 0 leaves none")
    assert not (tmp_path / "run").exists()
    for allowed in ({"keep": "last"}, {"personal_steps": 0}):
        comparison.check_validation(from_settings(world.settings(**allowed)))
    comparison.check_validation(from_settings(world.settings(validation=["a.csv"], **setting)))


# ---- early stopping ----


def script_losses(monkeypatch: pytest.MonkeyPatch, means: Iterator[float]) -> None:
    """Every evaluation finds the next of these mean losses."""
    original = trial.Deployment.look

    def scripted(self: Any, *args: Any) -> Any:
        return original(self, *args) * 0 + next(means)

    monkeypatch.setattr(trial.Deployment, "look", scripted)


def test_patience_stops_after_so_many_evaluations_without_a_better_loss(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over clients falls, rises, falls to no less than before: with a patience of 2 the fourth is the last."""
    means = iter([0.9, 0.8, 0.85, 0.8, 0.1, 0.1])
    script_losses(monkeypatch, means)
    settings = VALIDATED | {"rounds": 12, "evaluate_every": 2, "patience": 2, "method": ["homlora"]}
    lines, runs = noted(world, **settings)
    (run,) = runs["homlora"]
    assert [r.round for r in run.rounds] == [*range(1, 9)]
    assert lines == [
        "HOMLoRA: stopped after round 8 of 12: the mean validation loss did not fall for 2 evaluations"
    ]
    last = run.rounds[-1]
    for point, final in ((last.served, run.served), (last.before_averaging, run.before_averaging)):
        assert point is not None and final is not None
        assert {metric: over.per_client for metric, over in final.items()} == point
    assert run.deploy is not None and run.choices is not None and last.ranks is not None
    assert set(run.candidates) == {"served", "before_averaging", "personal_steps"}
    assert run.seconds == pytest.approx(sum(r.seconds for r in run.rounds))


def test_patience_that_lasts_to_the_end_is_said_before_training(world: World) -> None:
    settings = VALIDATED | {"rounds": 2, "evaluate_every": 1, "method": ["homlora"]}
    lines, _ = noted(world, **settings, patience=1)
    assert lines == ["--patience 1 cannot stop this run early, which is evaluated 2 times (--evaluate-every)"]


def test_every_seed_stops_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    means = iter([0.5, 0.6, 0.5, 0.4, 0.6])  # the first seed's two rounds, then the second's three
    script_losses(monkeypatch, means)
    settings = VALIDATED | {"rounds": 9, "patience": 1, "seeds": 2, "method": ["local"]}
    lines, runs = noted(world, **settings)
    assert [len(run.rounds) for run in runs["local"]] == [2, 3]
    assert [line.split(":")[0] for line in lines] == ["Local, seed 0", "Local, seed 1"]
    assert lines[0].endswith("did not fall for 1 evaluation")


def test_an_evaluation_that_is_better_begins_the_wait_anew() -> None:
    stopper = Stopper(2)
    losses = [0.9, 0.95, 0.8, 0.8, 0.85]
    assert [stopper.enough(torch.tensor([loss, math.nan])) for loss in losses] == [False] * 4 + [True]
    never = Stopper(None)
    assert not any(never.enough(torch.tensor([1.0])) for _ in range(50))


# ---- seeds side by side ----


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested dicts and lists by its place."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        return {path: value}
    return {k: v for key, inner in items for k, v in numbers(inner, f"{path}.{key}").items()}


def plain(run: SeedRun) -> dict[str, Any]:
    values = {key: value for key, value in asdict(run).items() if key not in OWN_COSTS}
    return {place: leaf for place, leaf in numbers(values).items() if not place.endswith(".seconds")}


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "method", ["pf2lora", "pf2lora-joint", "homlora", "per-fedavg", "hetlora", "centralized", "local"]
)
def test_seeds_in_one_pass_are_the_seeds_one_by_one(method: str, world: World, resized: list[bool]) -> None:
    settings = VALIDATED | {"method": [method], "seeds": 3, "rounds": 3, "evaluate_every": 1, "seed": 4}
    config = from_settings(world.settings(**settings, participation=0.7))
    workload = prepare(config)
    together = run_together(workload, method, (4, 5, 6), Watcher())
    assert [outcome.record.seed for outcome in together] == [4, 5, 6]
    together[0].model.remove()
    for outcome in together:
        (alone,) = run_together(workload, method, (outcome.record.seed,), Watcher())
        found, expected = plain(outcome.record), plain(alone.record)
        assert found.keys() == expected.keys()
        for place, value in expected.items():
            same = pytest.approx(value, abs=2e-4) if isinstance(value, float) else value
            if "flops" not in place:  # a pass is as long as its longest row, and others' rows are in it
                assert found[place] == same, place
        torch.testing.assert_close(outcome.personal_of_client, alone.personal_of_client, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(outcome.common_of_client, alone.common_of_client, atol=1e-3, rtol=1e-2)
        alone.model.remove()
    assert any(resized) == method.startswith("pf2lora")  # each client found its size beside the others


def test_seeds_that_take_too_much_memory_together_go_one_by_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = world.settings(method=["homlora"], seeds=2, rounds=2, lr=1e-3)
    expected = pf2lora.federate(**settings).methods["homlora"].runs
    original, asked = trial.train, list[tuple[int, ...]]()

    def small_device(method: Any, F: Any, state: Any, source: Any, schedule: Any, **options: Any) -> Any:
        asked.append(schedule.seeds)
        if len(schedule.seeds) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return original(method, F, state, source, schedule, **options)

    removed: list[TwoLevelModel] = []
    remove = TwoLevelModel.remove
    monkeypatch.setattr(trial, "train", small_device)

    def watched(model: TwoLevelModel) -> None:
        removed.append(model)
        remove(model)

    monkeypatch.setattr(TwoLevelModel, "remove", watched)
    lines: list[str] = []
    result = compare(from_settings(settings), Watcher(on_note=lines.append))
    assert asked == [(0, 1), (0,), (1,)] and len(removed) == 5  # a check, round 0, and one for each of these
    assert lines == [OFF, "homlora: 2 seeds in one pass take more memory than there is: one by one"]
    for one, other in zip(result.methods["homlora"].runs, expected):
        assert one.served["loss"].per_client == pytest.approx(other.served["loss"].per_client, abs=1e-5)
    monkeypatch.setattr(trial, "train", lambda *a, **o: raised())
    with pytest.raises(torch.cuda.OutOfMemoryError):
        compare(from_settings(settings | {"seeds": 1}))


def raised() -> Any:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


# ---- warnings ----


def rounds_of(*losses: list[float | None]) -> list[RoundRecord]:
    return [RoundRecord(i, 1.0, list(own)) for i, own in enumerate(losses, 1)]


def test_a_loss_has_risen_when_it_can_be_seen() -> None:
    names = ["a", "b", "c", "d", "e"]
    rounds = rounds_of(
        [0.693, 0.693, 0.10, 5.0, None], [0.1, 0.9, 0.2, 0.2, 1.0], [0.70, 0.79, 0.108, 5.09, 2.0]
    )
    lines = training_warnings(names, rounds, [], client_lr=True)
    assert [line.split("'")[1] for line in lines] == ["b", "e"]  # by a tenth; and 'e' began late
    assert lines[0].endswith("(0.693 → 0.790); a smaller lr or client_lr may help")
    (line,) = training_warnings(["b"], rounds_of([0.5], [0.6]), [], client_lr=False)
    assert line.endswith("a smaller lr may help")
    noisy = rounds_of([0.6], [0.8], [0.3], [0.5], [0.6], [0.8])  # the last third: 0.7, its rounds ± 0.14
    assert training_warnings(["a"], noisy, [], client_lr=True) == []
    plain = rounds_of([0.6], [0.8], [0.3], [0.5], [0.7], [0.9])  # ± 0.14 too, but a third above its start
    assert len(training_warnings(["a"], plain, [], client_lr=True)) == 1
    (line,) = training_warnings(
        ["a"], rounds_of([0.6], [0.61], [0.3], [0.5], [0.7], [0.71]), [], client_lr=True
    )
    assert "(0.600 → 0.705)" in line


def test_nothing_is_warned_of_at_our_own_defaults(world: World) -> None:
    """An own adapter that found the size 0, or has no rank, has not stopped moving."""
    given = world.settings(rounds=12, steps=8)
    defaults = {key: given[key] for key in given if key not in ("client_lr", "validation_ratio")}
    tried: list[dict[str, Any]] = [{}, {"participation": 0.4}, {"client_rank": 0}]
    for changes in (*tried, {"client_rank": 0, "client_lr": 0.1}):
        result = pf2lora.federate(**defaults | {"method": ["pf2lora", "pf2lora-joint"]} | changes)
        assert [run.warnings for method in result.methods.values() for run in method.runs] == [[], []]
    rising = pf2lora.federate(**defaults | {"method": ["pf2lora", "homlora"], "lr": 3.0, "steps": 2})
    for method in rising.methods.values():
        assert method.runs[0].warnings
        assert not any("client_lr" in line for line in method.runs[0].warnings)


# ---- on the command line ----


def test_validation_files(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for i, path in enumerate(world.clients):
        write_jsonl(
            tmp_path / "validation" / path.name, sentences(30 + i, 50 + i, flipped=path.stem == "west")
        )
    files = sorted(str(path) for path in (tmp_path / "validation").iterdir())
    args = ["train", *world.base, "--validation", *files, "--client-lr", "auto", "--out", tmp_path / "run"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and "48 to 80 training rows each; 93 validation and 48 test rows in all" in out
    result = load_result(tmp_path / "run")
    assert [(c.train, c.validation, c.test) for c in result.clients] == [
        (48, 30, 12),
        (64, 31, 16),
        (80, 32, 20),
    ]
    assert result.point == "deploy" and "deploy: north: " in " ".join(out.split())
    line = next(line for line in out.splitlines() if "averaging" in line)
    assert line.split()[-5:] == ["averaging", "deploy", "client", "spread", "round"] or "deploy" in line


def test_without_validation_rows_the_table_has_no_deploy(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    args = ["train", *world.base, "--client-lr", "auto", "--out", tmp_path / "run"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and out.count("no validation rows") == 1 and "--client-lr auto is 0.03" in out
    assert out.count("deploy") == 1 and "validation and" not in out
    code, _, err = command_line(monkeypatch, capsys, *args, "--patience", 3, "--force")
    assert code == 2 and err == (
        "pf2lora: --patience 3 is judged on validation rows, and --validation-ratio 0 leaves none\n"
    )


def test_client_lr_is_a_number_or_auto(world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for given, written in (
        ("auto", 'client_lr = "auto"'),
        ("0.03", "client_lr = 0.03"),
        ("0", "client_lr = 0.0"),
    ):
        code, out, _ = command_line(monkeypatch, capsys, "train", "--client-lr", given, "--print-config")
        assert code == 0 and written in out.splitlines()
    for given, message in (
        ("quick", "client_lr must be a number or auto, not 'quick'"),
        ("nan", "client_lr must be a finite number"),
        ("-1", "client_lr is -1.0; it must be 0 or more"),
    ):
        code, out, err = command_line(monkeypatch, capsys, "train", "--client-lr", given, "--print-config")
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err


def test_early_stopping_is_said(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    settings = {k: v for k, v in LEARNING.items() if k not in FAST} | {"lr": 0.05}
    more = flags(settings | {"validation_ratio": 0.2, "rounds": 30, "steps": 2, "patience": 1})
    args = ["train", *world.base, *more, "--method", "homlora", "--out", tmp_path / "run"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    last = load_result(tmp_path / "run").methods["homlora"].runs[0].rounds[-1].round
    assert code == 0 and last < 30
    assert f"HOMLoRA: stopped after round {last} of 30" in out
