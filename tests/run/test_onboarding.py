"""A newcomer in a run's result: chosen on validation rows, added whole or not at all, redone, and of every task."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from little_world import (
    LEARNING,
    World,
    command_line,
    make_world,
    opened,
    sentences,
    write_jsonl,
)
from tiny_tasks import write_generation_task, write_question_task

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run.evaluation import Models
from pf2lora.run.joining import Joining, scores_of
from pf2lora.run.onboarding import onboard, read_client, with_newcomer
from pf2lora.run.result import load_result

RUN = LEARNING | {"rounds": 6, "validation_ratio": 0.25}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    pf2lora.federate(**world.settings(**RUN), out=world.root / "run")
    return world


@pytest.fixture
def run(world: World, tmp_path: Path) -> Path:
    """A run that may be changed."""
    return Path(shutil.copytree(world.root / "run", tmp_path / "run"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "east.jsonl", sentences(80, seed=9, flipped=True))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_enters_the_result_and_the_report_and_changes_nothing_else(run: Path, file: Path) -> None:
    before, result = contents(run), load_result(run)
    record = onboard(opened(run), "east", file, rounds=4)
    changed = {p.relative_to(run) for p, data in contents(run).items() if before.get(p) != data}
    own = {p for p in changed if p.parts[:2] == ("clients", "east")}
    assert {p.name for p in own} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "onboarding.json",
        "README.md",
    }
    assert {str(p) for p in changed - own} == {
        "state/clients/east.safetensors",
        "state/run.json",
        "result.json",
        "report.html",
    }
    after = load_result(run)
    assert after == with_newcomer(result, record) and after.newcomers == [record]
    assert (record.client.train, record.client.validation, record.client.test) == (48, 16, 16)
    page = (run / "report.html").read_text()
    assert 'id="newcomers"' in page and "east" in page
    assert not any(path.name.startswith(".") for path in run.iterdir())


def test_it_deploys_what_is_clearly_best_on_its_validation_rows(run: Path, file: Path) -> None:
    """To whom words mean the opposite, the common adapter alone is no use; and the choice is by those rows alone."""
    record = onboard(opened(run), "east", file, rounds=4)
    assert record.choice is not None and record.served == "own"
    losses = record.choice.last_round
    assert set(losses) == set(record.scores) == {"own", "common", "personal_steps", "local"}
    assert record.deploys != "common" and losses["common"] == max(loss or 0 for loss in losses.values())
    assert record.choice.validation_loss is not None
    assert record.choice.validation_loss <= min(loss or 9 for loss in losses.values()) + 1e-9 or (
        record.deploys == "own"
    )
    assert set(record.errors) == {*record.scores, "deploy"}


def test_an_adapter_of_its_own_that_does_harm_is_not_deployed(run: Path, tmp_path: Path) -> None:
    """At a rate that ruins it, something else is better on its validation rows, and is what the folder holds."""
    file = write_jsonl(tmp_path / "east.jsonl", sentences(120, seed=9))
    loaded = opened(run)
    record = onboard(loaded, "east", file, rounds=3, client_lr=50.0)
    assert record.client_lr == "50.0" and record.choice is not None and record.deploys != "own"
    losses = record.choice.last_round
    assert losses["own"] is not None and losses["common"] is not None and losses["common"] < losses["own"]
    assert (
        record.choice.validation_loss == losses[record.deploys] == min(losses.values(), key=lambda v: v or 0)
    )
    client = read_client(loaded, "east", file)
    saved = Joining(loaded, client).measure(Models(*opened(run).client("east")))
    assert scores_of(saved) == pytest.approx(record.deploy, abs=1e-6)


def test_a_newcomer_without_rows_to_choose_by_has_the_fixed_rate(world: World, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "east.jsonl", sentences(40, seed=9, flipped=True))
    found = []
    for rate in ("auto", 0.03):
        run = tmp_path / f"run-{rate}"
        pf2lora.federate(**world.settings(client_lr=rate, client_bias=False, out=run))
        found.append(onboard(opened(run), "east", file, rounds=3))
    assert found[0].scores == found[1].scores


def test_test_rows_of_its_own(run: Path, file: Path, tmp_path: Path) -> None:
    test = write_jsonl(tmp_path / "test.jsonl", sentences(30, seed=3, flipped=True))
    record = onboard(opened(run), "east", file, rounds=1, test=test)
    assert (record.client.train + record.client.validation, record.client.test) == (80, 30)


def test_it_is_redone_when_that_is_asked_for(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    args = ["onboard", run, file, "--client", "east", "--rounds", "1"]
    assert command_line(monkeypatch, capsys, *args)[0] == 0
    first = (run / "state" / "clients" / "east.safetensors").read_bytes()
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "who joined later; --force replaces it" in err
    code, out, err = command_line(monkeypatch, capsys, *args[:-1], "3", "--force", "--json")
    assert code == 0 and "replaces the newcomer 'east' of 20" in err and "with 48 training rows" in err
    assert json.loads(out)["rounds"] == 3
    assert [n.rounds for n in load_result(run).newcomers] == [3]
    assert (run / "state" / "clients" / "east.safetensors").read_bytes() != first
    assert json.loads((run / "state" / "run.json").read_text())["clients"] == [
        "north",
        "south",
        "west",
        "east",
    ]
    code, _, err = command_line(monkeypatch, capsys, "onboard", run, file, "--client", "north", "--force")
    assert code == 2 and "took part in the training" in err


def test_what_goes_wrong_while_it_is_written_changes_nothing(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onboard(opened(run), "east", file, rounds=1)
    before = contents(run)

    def fail(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pf2lora.report.build", fail)  # the last thing that is written
    for name, force in (("east", True), ("far-east", False)):
        with pytest.raises(KeyboardInterrupt):
            onboard(opened(run), name, file, rounds=1, force=force)
        assert contents(run) == before


@pytest.mark.parametrize("after", [0, 3, 6, 7, 8])
def test_a_stop_between_two_renames_leaves_a_run_that_can_be_used_and_joined(
    after: int, run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, renamed, replace = contents(run), [0], Path.replace

    def stopped(self: Path, target: Path) -> Path:
        if ".newcomer" in self.parts and ".partial" not in self.name:
            if renamed[0] == after:
                raise KeyboardInterrupt
            renamed[0] += 1
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            onboard(opened(run), "east", file, rounds=1)
    joined = "east" in opened(run).saved.clients  # by its name, which comes when its files are there
    assert joined == (after > 6) and (contents(run) == before) == (not joined)
    if joined:
        opened(run).client("east")
    assert [c.name for c in load_result(run).clients] == ["north", "south", "west"]
    onboard(opened(run), "east", file, rounds=1, force=True)
    assert opened(run).saved.clients[-1] == "east" and len(load_result(run).newcomers) == 1


def test_what_a_kill_leaves_is_no_run_and_goes_with_the_next(run: Path, file: Path) -> None:
    left = run / ".newcomer" / "state"
    left.mkdir(parents=True)
    (left / "run.json").write_text("{")
    assert opened(run).saved.clients == ["north", "south", "west"]
    onboard(opened(run), "east", file, rounds=1)
    assert not left.exists()


def test_a_run_that_has_not_ended_is_not_joined(run: Path, file: Path) -> None:
    """Going on would write its result anew."""
    (run / "checkpoints" / "000001").mkdir(parents=True)
    (run / "checkpoints" / "000001" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="has not ended"):
        onboard(opened(run), "east", file)


def test_a_page_of_somebody_elses_stays(run: Path, file: Path) -> None:
    (run / "report.html").write_text("mine")
    notes: list[str] = []
    onboard(opened(run), "east", file, rounds=1, on_note=notes.append)
    assert (run / "report.html").read_text() == "mine" and "stays as it is" in notes[0]
    os.remove(run / "result.json")
    onboard(opened(run), "far-east", file, rounds=1, on_note=notes.append)
    assert "in no report" in notes[-1] and not (run / "result.json").exists()


def test_a_result_that_cannot_be_read_is_told_before_the_work(run: Path, file: Path) -> None:
    (run / "result.json").write_text("{")
    before = contents(run)
    with pytest.raises(UserError, match=r"result\.json"):
        onboard(opened(run), "east", file)
    assert contents(run) == before


@pytest.mark.parametrize("write", [write_question_task, write_generation_task])
def test_every_task(
    write: Callable[..., tuple[Path, list[Path]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no Java: scores are not the question
    model, files = write(tmp_path, ["north", "south", "east"])
    task = "question-answering" if write is write_question_task else "generation"
    settings: dict[str, Any] = {"task": task, "rounds": 1, "steps": 2, "batch_size": 4, "device": "cpu"}
    settings |= (
        {"max_length": 32, "stride": 4}
        if task == "question-answering"
        else {"max_length": 64, "max_new_tokens": 4}
    )
    pf2lora.federate(
        model=model, clients=files[:2], out=tmp_path / "run", validation_ratio=0.25, rank=4, **settings
    )
    record = onboard(opened(tmp_path / "run"), "east", files[2])
    result = load_result(tmp_path / "run")
    assert result.newcomers == [record] and result.metric in record.deploy
    assert record.choice is not None and set(record.scores) >= {"own", "common", "local"}
