"""Runs of the rules for the lower level, and the script that compares them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from little_world import World, make_world
from lower_level_benchmark import (
    ALL,
    KINDS,
    lower_level,
    made,
    problem,
    rules,
    same,
)
from tiny import EveryRound, Problem

from pf2lora.core.choice import Judge
from pf2lora.core.method import take
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.methods import own_size
from pf2lora.methods.own_size import ALPHA
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run.comparison import Watcher, prepare, run_together
from pf2lora.run.config import from_settings
from pf2lora.run.set_up import set_up

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- runs ----


def trained(method: rules.Rule, p: Problem, clients: list[int], rounds: int = 3) -> list[Round]:
    """Some of the problem's clients, who judge by other rows."""

    def judges(some: Any) -> Judge:
        whose = [clients[i] for i in some]
        rows = p.source.draw(whose, [1000] * len(whose))
        return lambda x, y: p.F(x, y, rows).unsqueeze(1)

    source: Any = SimpleNamespace(
        names=[p.source.names[k] for k in clients],
        sizes=[p.source.sizes[k] for k in clients],
        draw=lambda some, numbers: p.source.draw([clients[i] for i in some], numbers),
    )
    state = take(method.init(p.x, p.y), clients)
    schedule = Schedule(rounds=rounds, steps=2)
    return [d.kept() for d in train(method, p.F, state, source, schedule, judges=EveryRound(judges))]


@pytest.mark.parametrize("mode", ["none", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_does_not_notice_who_trains_beside_it(kind: type[rules.Rule], mode: str) -> None:
    """In the first round, and what it keeps; with the average it hears of the others."""
    p = problem()
    method = made(kind, p, hypergradient_mode=mode)
    together = trained(method, p, ALL)
    assert torch.isfinite(torch.stack([done.stats.loss for done in together])).all()
    assert together[-1].stats.loss.mean() < together[0].stats.loss[0].mean()
    for k in ALL:
        alone = trained(method, p, [k], rounds=1)
        same(take(together[0].before, [k]), alone[0].before)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", KINDS)
def test_seeds_in_one_pass_are_the_seeds_one_by_one(kind: type[rules.Rule], world: World) -> None:
    """Whole runs of the method by its name, with validation rows and what clients deploy; in float32."""
    name = f"lower_level_rules:{kind.__name__}"
    settings = world.settings(
        method=[name], seeds=2, client_lr="auto", validation_ratio=0.2, hypergradient_mode="none"
    )
    workload = prepare(from_settings(settings))
    together = run_together(workload, name, (0, 1), Watcher())
    together[0].model.remove()
    for outcome in together:
        (alone,) = run_together(workload, name, (outcome.record.seed,), Watcher())
        alone.model.remove()
        assert all(loss is not None for r in outcome.record.rounds for loss in r.train_loss)
        for a, b in zip(outcome.record.rounds, alone.record.rounds, strict=True):
            assert a.train_loss == pytest.approx(b.train_loss, abs=1e-4)
            assert a.validation_loss == pytest.approx(b.validation_loss, abs=1e-4)
        torch.testing.assert_close(outcome.personal_of_client, alone.personal_of_client, atol=1e-4, rtol=1e-3)
        assert torch.isfinite(outcome.personal_of_client).all()


# ---- the script ----


def test_every_rule_can_be_set_up_with_what_it_says(world: World) -> None:
    """By its settings, as the script builds them: they reach the method, and its adapter has a bias where it should."""
    shared = world.settings(validation_ratio=0.2, client_lr="auto", hypergradient_mode="none") | {"rank": 8}
    workload = prepare(from_settings(shared | {"method": ["pf2lora"]}))
    for rule, (own, values) in lower_level.RULES.items():
        config = from_settings(shared | {"method": ["pf2lora"]} | own, rule)
        with patch.multiple(own_size, **{"ALPHA": ALPHA} | values):
            trial = set_up(
                type(workload)(**vars(workload) | {"config": config}), config.training.method[0], 0
            )
            trial.model.remove()
            method: Any = trial.method
            if isinstance(method, PF2LoRA):
                assert method.hypergradient_mode == "none"
                assert method.rate == values.get("ALPHA", own.get("client_lr", ALPHA))
                biased = any(e.kind == "head" for e in trial.model.personal_layout.entries)
                assert biased == (rule not in ("no bias", "fixed 0.03"))
        for table in own.get("methods", {}).values():
            assert type(method).__module__ == "lower_level_rules"
            assert {key: getattr(method, key) for key in table} == table
    assert {type_ for type_, _ in map(rule_kind, lower_level.RULES)} >= {k.__name__ for k in KINDS}


def rule_kind(rule: str) -> tuple[str, str]:
    return lower_level.RULES[rule][0].get("method", [""])[0].rpartition(":")[2], rule


def line(rule: str, task: str, served: list[Any], deploy: list[Any]) -> dict[str, Any]:
    return {"rule": rule, "task": task, "served": served, "deploy": deploy}


LINES = [
    line("a", "t", [90.0, 92.0], [91.0, 91.0]),
    line("a", "u", [40.0], [50.0]),
    line("b", "t", [70.0], [70.0]),  # run again below
    line("b", "t", [90.5, 90.5], [95.0, 95.0]),
    line("b", "u", [42.0, 42.0], [50.0, 49.0]),
    line("part", "u", [60.0], [40.0]),
    {"rule": "broken", "task": "t", "broke": "no number"},
    line("broken", "u", [None, 50.0], [1.0, 1.0]),
]


def test_rules_are_sorted_by_regret() -> None:
    rows = lower_level.compared(LINES, "served")
    assert [row.rule for row in rows] == ["b", "a", "broken", "part"]  # the last has one task alone
    first = asdict_row(rows[0])
    assert first == {"t": (90.5, 0.5), "u": (42.0, 18.0)} and rows[0].regret == 18 and rows[0].mean == 9.25
    assert rows[1].scores["t"] == (91.0, pytest.approx(2**0.5)) and rows[1].regret == 20
    assert rows[2].regret == float("inf") and rows[3].regret == 0


def test_a_rule_at_another_rate_is_another() -> None:
    again = [line("a", "t", [95.0], [95.0]) | {"lr": "auto"}, line("a", "t", [90.0], [90.0])]
    rows = lower_level.compared(again, "served")
    assert [(row.rule, row.regret) for row in rows] == [("a, lr auto", 0), ("a, lr 0.001", 5)]


def asdict_row(row: Any) -> dict[str, tuple[float, float]]:
    return {task: (row.scores[task][0], row.behind[task]) for task in row.scores}


def test_the_tables_are_read_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("".join(json.dumps(found) + "\n" for found in LINES[:4]), encoding="utf8")
    files[1].write_text(
        "".join(json.dumps(found) + "\n" for found in LINES[4:]) + '{"rule": "c', encoding="utf8"
    )
    lower_level.main(["--read", *map(str, files)])
    out = capsys.readouterr().out
    served, deploy = out.split("\n\n")
    assert "left out" in served and "90.5±0.0 -0.5" in served and "91.0±1.4 best" in served
    assert "broke" in served
    assert deploy.splitlines()[1].split() == ["b", "0.5", "0.2", "95.0±0.0", "best", "49.5±0.7", "-0.5"]
    lower_level.main(["--list"])
    shown = capsys.readouterr().out
    assert all(rule in shown for rule in lower_level.RULES) and "cola 0.9, sst2 0.3" in shown
    with pytest.raises(SystemExit):
        lower_level.main([])


def test_a_line_for_every_run_and_one_that_breaks_ends_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clients = [str(path) for path in world.clients]
    small: dict[str, Any] = {"clients": clients, "rounds": 2, "device": "cpu"}
    tasks = {"first": small, "cola 0.9": small}
    monkeypatch.setattr(lower_level, "tasks", lambda data, work: tasks)
    monkeypatch.setitem(lower_level.RULES, "breaks", ({"client_lr": 1e30}, {}))
    out = tmp_path / "out.jsonl"
    flags = ["--model", str(world.model), "--out", str(out), "--seeds", "1", "--every", "1"]
    lower_level.main([*flags, "--rules", "homlora", "breaks", "own rate"])
    found = [json.loads(text) for text in out.read_text(encoding="utf8").splitlines()]
    assert [(f["task"], f["rule"]) for f in found] == [
        ("first", r) for r in ("homlora", "breaks", "own rate")
    ]
    assert "became" in found[1]["broke"] and "served" not in found[1]
    assert all(len(f["served"]) == len(f["deploy"]) == 1 for f in (found[0], found[2]))
    shown = capsys.readouterr().out
    assert shown.count("regret") == 2 and "own rate" in shown.split("regret")[-1]
    with pytest.raises(SystemExit, match=r"cola 0\.9"):
        lower_level.main([*flags, "--tasks", "cola"])
