"""`--dry-run` of reproductions and federations: what would run, what is missing, what it would cost; nothing begins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from little_world import World, command_line, flags, make_world
from paper_world import write_glue, write_models
from regret_world import make_benchmark

import pf2lora
from pf2lora.reproduce.regret.tasks import COMMON
from pf2lora.run.config import from_settings
from pf2lora.run.dry_run import sent_without_data

QUICK = flags({"rounds": 2, "steps": 1, "batch_size": 2, "device": "cpu"})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_a_preset_says_what_it_would_run_and_what_is_missing(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    write_models(tmp_path)
    write_glue(tmp_path / "data")

    def dry(*args: object) -> tuple[int, str, str]:
        words = ["reproduce", "glue-roberta-base", "--only", "sst2", "--only", "cola", *QUICK]
        return command_line(monkeypatch, capsys, *words, "--dry-run", "--out", tmp_path / "out", *args)

    code, out, err = dry("--model", tmp_path / "classifier", "--data-dir", tmp_path / "data")
    assert (code, err) == (0, ""), err
    assert re.search(r"sst2 +8 +5 +2 × 1 +1 +about ", out) and "all of it: about" in out
    code, out, err = dry("--model", tmp_path / "no-model", "--data-dir", tmp_path / "no-data")
    assert code == 2 and "nothing was trained or written" in out
    lines = err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["cola", "sst2"]
    assert all(
        "no model folder" in line and "no-data" in line for line in lines
    )  # every problem, not the first
    assert not (tmp_path / "out").exists()


def test_a_preset_that_is_counted_needs_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    args = ["reproduce", "parameters", "--dry-run", "--out", tmp_path / "out"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and "counted, in seconds" in out and not (tmp_path / "out").exists()


def test_the_benchmark_says_how_many_runs_are_left(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    root = make_benchmark(tmp_path)
    for name, value in {"steps": 1, "batch_size": 4}.items():
        monkeypatch.setitem(COMMON, name, value)
    args = [
        "--model",
        root / "model",
        "--data-dir",
        root / "data",
        "--device",
        "cpu",
        "--out",
        tmp_path / "out",
    ]
    args += ["--rounds", 2, "--seeds", 1, "--tries", 2, "--tasks", "sst2-h0.9"]
    args += ["--variants", "pf2lora", "homlora", "--dry-run"]
    code, out, err = command_line(monkeypatch, capsys, "reproduce", "regret", *args)
    assert re.search(r"sst2-h0\.9 +2 +0 +8 +2 × 1 +1 +about ", out), out
    assert (code, err) == (0, "") and not (tmp_path / "out").exists()


def test_a_rehearsal_shows_its_plan_its_bytes_and_its_privacy(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip("nvflare")
    pytest.importorskip("dp_accounting")
    args = ["federation", "rehearse", *world.base, "--out", tmp_path / "run", "--dry-run"]
    private = ["--wire", "bfloat16", "--dp-epsilon", "8", "--dp-delta", "0.001"]
    code, out, err = command_line(monkeypatch, capsys, *args, *private)
    assert code == 0 and not (tmp_path / "run").exists(), err
    sent = pf2lora.federate(**world.settings()).methods["pf2lora"].runs[0].bytes_per_round.total
    assert f"a site sends {sent / 2000:.3g} kB a round (bfloat16)" in out
    assert "privacy: ε = 8 at δ = 0.001 for each client (2 rounds" in out
    assert "a round asks 3 sites and needs 2" in out and "[CLS]" in out
    code, out, err = command_line(monkeypatch, capsys, *args, "--method", "homlora", "local")
    assert code == 2 and "one method with one seed" in err


def test_a_submission_is_checked_without_a_server(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip("nvflare")
    args = ["federation", "submit", "--kit", tmp_path, "--sites", "a,b,c", "--labels", "neg,pos", "--dry-run"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and "--model counts it" in out and "nothing was submitted" in out
    code, out, _ = command_line(monkeypatch, capsys, *args, "--model", world.model, "--rank", 4)
    sent = sent_without_data(from_settings(world.settings()), ["neg", "pos"], 3)
    assert code == 0 and f"a site sends {sent / 1000:.3g} kB a round (float32)" in out
    code, _, err = command_line(monkeypatch, capsys, *args, "--quorum", "2")
    assert code == 2 and "quorum is 2.0" in err
    code, _, err = command_line(monkeypatch, capsys, *args, "--kit", tmp_path / "none")
    assert code == 2 and "no such kit" in err
