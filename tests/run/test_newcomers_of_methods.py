"""A newcomer joins a run of every method that has something to join."""

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
OTHERS = [name for name in METHODS.own if name not in (*ABLE, "local")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    pf2lora.federate(**world.settings(method=ABLE, rounds=2, out=world.root / "run"))
    return world


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("others"))
    settings = {"method": OTHERS, "rounds": 1, "validation_ratio": 0.2, "lr": 0.01}
    pf2lora.federate(**world.settings(**settings, out=world.root / "run"))
    return world


@pytest.mark.parametrize("method", ABLE)
def test_its_own_part_is_fitted_on_the_common_one(method: str, world: World, tmp_path: Path) -> None:
    run = opened(world.root / "run", method)
    common, _ = run.common()
    file = write_jsonl(tmp_path / "east.jsonl", sentences(40, seed=5))
    found = onboarding.onboard(run, "east", file)
    assert set(found.scores) == {"own", "common", "local"} and found.choice is None and found.deploys == "own"
    x, y = opened(world.root / "run", method).client("east")
    assert torch.equal(x, common) and y.any()  # the head is shared: only y was fitted
    assert y.shape[1] == run.model.personal_layout.size
    if method.startswith("feddpa"):
        rows = read_rows(run.config.task, file, run.saved.labels)
        with pytest.raises(UserError, match="east joined later"):
            opened(world.root / "run", method).answers("east", rows, rows)


@pytest.mark.no_cover
@pytest.mark.parametrize("method", OTHERS)
def test_a_method_without_own_adapters_gives_its_common_one(
    method: str, others: World, tmp_path: Path
) -> None:
    """As it is, or adapted as the method does; or trained on alone, if that is clearly better on validation rows."""
    run = opened(others.root / "run", method)
    common, _ = run.common()
    found = onboarding.onboard(
        run, "east", write_jsonl(tmp_path / "east.jsonl", sentences(60, seed=5, flipped=True))
    )
    served = "adapted" if method in ("per-fedavg", "homlora-ft") else "common"
    assert found.served == served and found.choice is not None and found.client_lr is None
    assert set(found.scores) == {served, "common", "personal_steps", "local"}
    assert set(found.choice.last_round) == set(found.scores)
    x, y = opened(others.root / "run", method).client("east")
    assert y.shape[1] == 0 and torch.equal(x, common) == (found.deploys == "common")
    assert found.deploy == found.scores[found.deploys]
    file = write_jsonl(tmp_path / "west.jsonl", sentences(20, seed=6))
    with pytest.raises(UserError, match="is the rate of a client's own adapter"):
        onboarding.onboard(run, "far-east", file, client_lr=0.1)


def test_who_is_alone_has_nothing_to_join(others: World, tmp_path: Path) -> None:
    pf2lora.federate(**others.settings(method="local", rounds=1, out=tmp_path / "run"))
    file = write_jsonl(tmp_path / "east.jsonl", sentences(20, seed=5))
    with pytest.raises(UserError, match="there is no common adapter to join"):
        onboarding.onboard(opened(tmp_path / "run"), "east", file)
