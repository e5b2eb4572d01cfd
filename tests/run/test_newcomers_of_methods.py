"""A newcomer joins a run of every method that gives clients something of their own to fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from little_world import World, make_world, opened, sentences, write_jsonl

import pf2lora
from pf2lora.data.loading import read_rows
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import onboarding

ABLE = [name for name in METHODS.own if METHODS[name].two_level]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    pf2lora.federate(**world.settings(method=ABLE, rounds=2, out=world.root / "run"))
    return world


@pytest.mark.parametrize("method", ABLE)
def test_its_own_part_is_fitted_on_the_common_one(method: str, world: World, tmp_path: Path) -> None:
    run = opened(world.root / "run", method)
    common, _ = run.common()
    file = write_jsonl(tmp_path / "east.jsonl", sentences(40, seed=5))
    found = onboarding.onboard(run, "east", file)
    assert set(found) == {"common adapter alone", "own adapter on it", "training alone"}
    x, y = opened(world.root / "run", method).client("east")
    assert torch.equal(x, common) and y.any()  # the head is shared: only y was fitted
    assert y.shape[1] == run.model.personal_layout.size
    if method.startswith("feddpa"):
        rows = read_rows(run.config.task, file, run.saved.labels)
        with pytest.raises(UserError, match="east joined later"):
            opened(world.root / "run", method).answers("east", rows, rows)
