"""A dry run: every problem at once, what the run would cost, and nothing trained or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from little_world import FAST, World, command_line, flags, make_world, sentences, write_csv, write_jsonl

import pf2lora
from pf2lora.run.comparison import Watcher, compare
from pf2lora.run.config import Config, from_settings
from pf2lora.run.dry_run import data_warnings, plan, problems
from pf2lora.run.workload import load_workload


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def config_of(world: World, **settings: Any) -> Config:
    given = world.settings(**settings)
    given |= {"model": str(given["model"]), "clients": [str(c) for c in given["clients"]]}
    return from_settings({k: v for k, v in given.items() if k != "out"})


@pytest.mark.parametrize("method", ["pf2lora", "homlora", "hetlora", "centralized", "ditto"])
def test_the_plans_counts_are_the_runs(method: str, world: World) -> None:
    config = config_of(world, method=[method], seeds=2)
    (planned,) = plan(config).methods
    record = pf2lora.federate(**world.settings(method=method)).methods[method].runs[0]
    assert planned.parameters == record.parameters
    assert planned.sent == record.bytes_per_round
    assert planned.training_seconds == pytest.approx(planned.step_seconds * FAST["steps"] * FAST["rounds"])
    assert planned.step_seconds > 0 and planned.evaluation_seconds > 0


def test_rows_are_shown_as_the_model_sees_them(world: World) -> None:
    workload = load_workload(config_of(world))
    words = workload.clients[0].train[0].text.split()
    first, second = plan(workload.config, workload).examples
    assert first.tokens == ["[CLS]", *words, "[SEP]"] and second != first
    assert first.about == f"label: {workload.clients[0].train[0].label}"


def test_every_problem_is_told_at_once(world: World, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    good = write_csv(tmp_path / "good.csv", sentences(20, 1))
    no_label = write_csv(tmp_path / "bare.csv", [{"text": "a"}])
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    clients = [good, no_label, tmp_path / "none*.csv", broken]
    found = list(problems(config_of(world, clients=clients, validation_ratio=0, patience=3)))
    for line, said in zip(found, ("--patience", "bare.csv", "no file matches", "broken.jsonl"), strict=True):
        assert said in line
    args = ["--model", world.root / "model", "--clients", good, no_label, broken, "--out", tmp_path / "out"]
    code, out, err = command_line(monkeypatch, capsys, "train", *args, "--dry-run")
    assert code == 2 and out == "" and not (tmp_path / "out").exists()
    assert [line.startswith("pf2lora: ") for line in err.splitlines()] == [True, True]
    assert "bare.csv" in err and "broken.jsonl" in err


def test_files_that_do_not_fit_together_are_a_problem(world: World, tmp_path: Path) -> None:
    train = [write_jsonl(tmp_path / f"{name}.jsonl", sentences(20, 1)) for name in ("a", "b")]
    test = [write_jsonl(tmp_path / "test" / "a.jsonl", sentences(5, 2))]
    (line,) = problems(config_of(world, clients=train, test=[str(t) for t in test]))
    assert "client 'b' has no test data" in line


def test_nothing_is_written(world: World, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    args = [*flags(FAST), "--model", world.root / "model", "--clients", world.root / "clients"]
    args += ["--method", "homlora", "pf2lora", "--out", tmp_path / "out"]
    code, out, err = command_line(monkeypatch, capsys, "compare", *args, "--dry-run")
    assert code == 0 and not (tmp_path / "out").exists(), err
    for said in ("HOMLoRA", "PF2LoRA", "[CLS]", "nothing was trained or written", "all of it: about"):
        assert said in out


def test_it_says_of_the_rows_what_the_run_says(world: World) -> None:
    config = config_of(world, method=["homlora"], lr=1e-3, validation_ratio=0, batch_size=200)
    planned, said = plan(config).warnings, list[str]()
    compare(config, Watcher(on_note=said.append))
    assert planned[: len(said)] == said and len(said) == 2


def test_data_that_says_less_than_it_seems_to(world: World, tmp_path: Path) -> None:
    one_label = [{"text": f"the film {i}", "label": "pos"} for i in range(20)]
    twice = sentences(20, 1)
    files = [
        write_jsonl(tmp_path / "alike.jsonl", one_label),
        write_jsonl(tmp_path / "first.jsonl", twice),
        write_jsonl(tmp_path / "second.jsonl", twice),
    ]
    config = config_of(world, clients=files)
    told = data_warnings(load_workload(config).clients, config)
    assert any("fewer than 100 test rows (the least: 4)" in line and "±50 points" in line for line in told)
    assert "alike has training rows of one label only" in told
    assert any("texts are in the training rows of two clients or more" in line for line in told)


def test_model_device_methods_and_folder_are_problems_beside_the_files(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    (tmp_path / "run.toml").write_text("[methods.pf2lora]\nalpa = 3\n")
    args = [
        "train",
        tmp_path / "run.toml",
        "--model",
        tmp_path / "no-model",
        "--clients",
        tmp_path / "x*.csv",
    ]
    args += ["--device", "gpu", "--out", tmp_path / "out", "--dry-run"]
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2
    for said in ("no model folder", "unknown device 'gpu'", "alpa", "no file matches", str(tmp_path / "out")):
        assert said in err, said


def test_test_rows_that_another_client_trains_on_are_told(world: World, tmp_path: Path) -> None:
    twice = sentences(20, 1)
    files = [write_jsonl(tmp_path / f"{name}.jsonl", twice) for name in ("first", "second")]
    config = config_of(world, clients=files, seed=3)
    clients = load_workload(config).clients
    trained = {row.text for client in clients for row in client.train}
    again = sum(row.text in trained for client in clients for row in client.test)
    told = data_warnings(clients, config)
    assert again and any(
        line.startswith(f"{again} of 8 test rows have a text that somebody") for line in told
    )
