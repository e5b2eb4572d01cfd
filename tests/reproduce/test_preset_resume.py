"""A part of a preset that was interrupted in the middle of a method goes on there, and ends as an unbroken one."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_runs import Killed, clocks_standing_still, killed_at
from little_world import World, make_world

from pf2lora.engines.bad_clients import Diverged
from pf2lora.reproduce.running import go_on
from pf2lora.run.checkpoints import Checkpoints
from pf2lora.run.comparison import compare, prepare
from pf2lora.run.config import from_settings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_a_method_goes_on_in_the_middle(world: World, tmp_path: Path) -> None:
    config = from_settings(world.settings(rounds=4, checkpoint_every=1, method=["homlora"]))
    folder, said = tmp_path / "homlora.checkpoints", list[str]()
    with clocks_standing_still():
        expected = compare(config)
        with pytest.raises(Killed), killed_at(2, Checkpoints, "after_round"):
            go_on(folder, config, prepare(config))
        assert folder.is_dir()
        found = go_on(folder, config, prepare(config), said.append)
    assert found == expected and not folder.exists()
    assert "HOMLoRA: going on after round 2 of 4" in said


def test_what_cannot_go_on_starts_anew(world: World, tmp_path: Path) -> None:
    config = from_settings(world.settings(rounds=3, checkpoint_every=1, method=["local"]))
    other = from_settings(world.settings(rounds=3, checkpoint_every=1, method=["local"], lr=0.5))
    folder, said = tmp_path / "local.checkpoints", list[str]()
    with clocks_standing_still():
        with pytest.raises(Killed), killed_at(1, Checkpoints, "after_round"):
            go_on(folder, config, prepare(config))
        found = go_on(folder, other, prepare(other), said.append)
        assert found == compare(other) and not folder.exists()
    (line,) = (line for line in said if "starts anew" in line)
    assert "training.lr was 'auto' and is 0.5" in line


def test_one_that_diverges_leaves_nothing_behind(world: World, tmp_path: Path) -> None:
    config = from_settings(world.settings(rounds=3, checkpoint_every=1, method=["local"], lr=1e30))
    with pytest.raises(Diverged):
        go_on(tmp_path / "local.checkpoints", config, prepare(config))
    assert not (tmp_path / "local.checkpoints").exists()
