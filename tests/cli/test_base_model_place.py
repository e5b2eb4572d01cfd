"""A run is used from any folder: its base model is known by its whole path and by its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from little_world import FAST, World, command_line, make_world
from safetensors.torch import load_file, save_file

import pf2lora
from pf2lora.run.saved import read_config


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that was made with a relative path to its model."""
    world = make_world(tmp_path / "world")
    monkeypatch.chdir(world.root)
    pf2lora.federate(**world.settings(**FAST | {"rounds": 1}, out=world.root / "run") | {"model": "model"})
    monkeypatch.chdir(tmp_path)
    return world


def test_a_run_is_used_from_another_folder(elsewhere: World, monkeypatch: Any, capsys: Any) -> None:
    args = ("predict", elsewhere.root / "run", "--client", "north", "the film was superb")
    code, out, err = command_line(monkeypatch, capsys, *args)
    assert code == 0 and err == "" and out.endswith("the film was superb\n")
    assert read_config(elsewhere.root / "run").model.name == str((elsewhere.root / "model").resolve())


def test_a_model_that_moved_is_named(elsewhere: World, monkeypatch: Any, capsys: Any) -> None:
    args = ("predict", elsewhere.root / "run", "--client", "north", "the film was superb")
    before = command_line(monkeypatch, capsys, *args)[1]
    (elsewhere.root / "model").rename(elsewhere.root / "moved")
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "where none is now; --model names its place" in err
    code, out, err = command_line(monkeypatch, capsys, *args, "--model", elsewhere.root / "moved")
    assert (code, out, err) == (0, before, "")


def test_other_weights_are_noticed(elsewhere: World, monkeypatch: Any, capsys: Any) -> None:
    file = elsewhere.root / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("query.weight"))
    tensors[name][0, 0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    args = ("predict", elsewhere.root / "run", "--client", "north", "the film was superb")
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "has other weights than the run was trained on" in err
    code, _, err = command_line(monkeypatch, capsys, *args, "--model", elsewhere.root / "model")
    assert code == 0 and "has other weights than the run was trained on" in err
