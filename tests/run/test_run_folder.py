"""The folder of a run: never overwritten unasked, written as it happens, and loaded again as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from little_world import World, make_world, opened
from safetensors.torch import load_file, save_file

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run import folder as run_folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    pf2lora.federate(**world.settings(out=world.root / "run", head="personal"))
    return world


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_empty_or_new_folder_is_taken(tmp_path: Path) -> None:
    run_folder.claim(tmp_path / "new" / "deep", force=False)
    assert (tmp_path / "new" / "deep").is_dir()
    run_folder.claim(tmp_path / "new" / "deep", force=False)


def test_another_run_is_left_alone(world: World) -> None:
    before = contents(world.root / "run")
    with pytest.raises(
        UserError, match=r"holds another run \(config.toml\); choose another --out, or --force"
    ):
        run_folder.claim(world.root / "run", force=False)
    with pytest.raises(UserError, match="holds another run"):
        pf2lora.federate(**world.settings(out=world.root / "run"))
    assert contents(world.root / "run") == before


@pytest.mark.parametrize(
    "file",
    [
        "metrics.jsonl",
        "common/adapter_config.json",
        "state/run.json",
        "methods/homlora/state/common.safetensors",
    ],
)
def test_a_part_of_a_run_is_a_run(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("")
    with pytest.raises(UserError, match="holds another run"):
        run_folder.claim(tmp_path, force=False)


def test_force_replaces_the_run_and_nothing_else(world: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = world.settings(out=out, method=["pf2lora", "homlora"])
    pf2lora.federate(**settings)
    mine = {
        "notes.txt": "mine",
        "clients/data.jsonl": "the user's own data",
        "clients/north/readme.md": "mine",
        "methods/mine.txt": "mine",
    }
    for name, text in mine.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    run_folder.claim(out, force=True)
    assert contents(out) == {name: text.encode() for name, text in mine.items()}
    assert not (out / "state").exists() and not (out / "methods" / "homlora").exists()


def test_a_users_clients_folder_is_no_run(world: World, tmp_path: Path) -> None:
    """`--clients clients/*.jsonl --out .` must neither be refused nor cost the data."""
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "a.jsonl").write_text("data")
    run_folder.claim(tmp_path, force=False)
    run_folder.claim(tmp_path, force=True)
    assert contents(tmp_path) == {"clients/a.jsonl": b"data"}


def test_bad_input_with_force_keeps_the_run_that_is_there(world: World) -> None:
    before = contents(world.root / "run")
    for mistake in (
        {"model": str(world.root / "none")},
        {"text": "body"},
        {"trackers": ["wandb"]},
        {"rank": 99},
        {"methods": {"pf2lora": {"gamma": 1.0}}},
    ):
        with pytest.raises(UserError):
            pf2lora.federate(**world.settings(out=world.root / "run") | mistake, force=True)
    assert contents(world.root / "run") == before


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; choose another --out"):
        run_folder.claim(tmp_path / "file", force=True)
    with pytest.raises(UserError, match="cannot be written"):
        run_folder.claim(tmp_path / "file" / "below", force=True)


def test_every_client_loads_as_it_was_saved(world: World) -> None:
    run = opened(world.root / "run")
    saved = load_file(world.root / "run" / "state" / "clients" / "north.safetensors")
    x, y = run.client("north")
    assert x.shape == (1, run.model.common_layout.size) and y.shape == (1, run.model.personal_layout.size)
    for layout, flat, prefix in (
        (run.model.common_layout, x, "common."),
        (run.model.personal_layout, y, "personal."),
    ):
        for name, tensor in layout.unpack(flat).items():
            assert torch.equal(tensor[0], saved[prefix + name])
    common, nothing = run.common()
    assert torch.equal(run.client(None)[0], common) and not nothing.any()
    assert torch.equal(common[:, : run.model.common_layout.shared], x[:, : run.model.common_layout.shared])
    run.model.remove()


def test_personal_heads_stay_with_their_clients(world: World) -> None:
    """The common adapter has the head that everybody began with, and nothing made of anybody's own."""
    run = opened(world.root / "run")
    first, _ = run.model.initial(run.saved.seed, ["anyone"])
    start = run.model.common_layout.shared
    heads = [run.client(name)[0][0, start:] for name in run.saved.clients]
    assert run.model.common_layout.head_size == len(heads[0]) > 0
    assert all(not torch.equal(head, first[0, start:]) for head in heads)
    assert torch.equal(run.common()[0][0, start:], first[0, start:])
    run.model.remove()


def test_what_cannot_be_opened(world: World, tmp_path: Path) -> None:
    run = world.root / "run"
    with pytest.raises(UserError, match="there is no run folder"):
        opened(tmp_path / "none")
    with pytest.raises(UserError, match=r"is no run folder: it has no config.toml"):
        opened(tmp_path)
    with pytest.raises(UserError, match="has no method 'local'; its methods: pf2lora"):
        opened(run, "local")
    (tmp_path / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(UserError, match=r"saved no adapters .it did not finish"):
        opened(tmp_path)
    (tmp_path / "state" / "clients").mkdir(parents=True)
    (tmp_path / "state" / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run.json, line 1, column 2: broken JSON"):
        opened(tmp_path)
    (tmp_path / "state" / "run.json").write_text((run / "state" / "run.json").read_text())
    loaded = opened(tmp_path)
    with pytest.raises(UserError, match="has no client 'nobody'; its clients: north, south, west"):
        loaded.client("nobody")
    with pytest.raises(UserError, match="has no common adapter"):
        loaded.common()
    file = tmp_path / "state" / "clients" / "north.safetensors"
    with pytest.raises(UserError, match="no such file"):
        loaded.client("north")
    file.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        loaded.client("north")
    save_file({"common.other": torch.zeros(2)}, file)
    with pytest.raises(UserError, match=r"no tensor .* the file does not fit this run"):
        loaded.client("north")
    loaded.model.remove()


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    run_folder.write_json(tmp_path / "a.json", {"one": 1})
    with pytest.raises(ValueError, match="JSON"):
        run_folder.write_json(tmp_path / "a.json", {"one": float("nan")})
    assert contents(tmp_path).keys() == {"a.json"} and json.loads((tmp_path / "a.json").read_text()) == {
        "one": 1
    }
