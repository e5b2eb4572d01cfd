"""What is shared holds nothing of a client's own: no y, no optimizer state, no text of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from little_world import LEARNING, SECRETS, World, make_world, opened
from safetensors.torch import load_file

import pf2lora

SHARED = (
    *("common/adapter_model.safetensors", "common/adapter_config.json", "state/common.safetensors"),
    *(
        "common/config.json",
        "common/README.md",
        "state/run.json",
        "metrics.jsonl",
        "result.json",
        "config.toml",
        "report.html",
    ),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    pf2lora.federate(**world.settings(**LEARNING | {"rounds": 3}, head="personal", out=world.root / "run"))
    return world


def bytes_of(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def test_the_search_finds_what_is_there(world: World) -> None:
    """Where it belongs, a client's y and its words are found by the same search."""
    y = opened(world.root / "run").client("north")[1]
    chunks = private_chunks(y[0])
    own = (world.root / "run" / "state" / "clients" / "north.safetensors").read_bytes()
    assert len(chunks) > 50 and all(chunk in own for chunk in chunks)
    assert SECRETS["north"].encode() in (world.root / "clients" / "north.jsonl").read_bytes()


def private_chunks(y: torch.Tensor, numbers: int = 4) -> list[bytes]:
    """Every few numbers of y as the bytes a file would hold; zeros tell nothing."""
    pieces = y.split(numbers)
    return [p.numpy().tobytes() for p in pieces if len(p) == numbers and (p != 0).all()]


@pytest.mark.parametrize("name", SECRETS)
def test_nothing_of_y_is_in_what_is_shared(name: str, world: World) -> None:
    _, y = opened(world.root / "run").client(name)
    chunks = private_chunks(y[0])
    for file, content in bytes_of(world.root / "run", SHARED).items():
        assert not any(chunk in content for chunk in chunks), file


@pytest.mark.parametrize("name", SECRETS)
def test_no_personal_head_is_in_what_is_shared(name: str, world: World) -> None:
    run = opened(world.root / "run")
    head = run.client(name)[0][0, run.model.common_layout.shared :]
    chunks = private_chunks(head)
    assert len(chunks) > 10
    for file, content in bytes_of(world.root / "run", SHARED).items():
        assert not any(chunk in content for chunk in chunks), file


def test_no_words_of_the_clients_texts_are_in_a_run_folder(world: World) -> None:
    """Not even in a client's own adapter folder: adapters are weights."""
    files = [p for p in (world.root / "run").rglob("*") if p.is_file()]
    assert len(files) > 10
    for file in files:
        content = file.read_bytes().lower()
        for word in SECRETS.values():
            assert word.encode() not in content, file


def test_the_common_adapter_is_x_and_nothing_more(world: World) -> None:
    run = opened(world.root / "run")
    names = {entry.name for entry in run.model.common_layout.entries}
    assert set(load_file(world.root / "run" / "state" / "common.safetensors")) == names
    weights = load_file(world.root / "run" / "common" / "adapter_model.safetensors")
    x, _ = run.common()
    views = run.model.common_layout.unpack(x)
    for layer in run.model.adapted:
        down = weights[f"base_model.model.{layer}.lora_A.weight"]
        up = weights[f"base_model.model.{layer}.lora_B.weight"]
        assert torch.equal(down, views[f"{layer}.A"][0]) and torch.equal(up, views[f"{layer}.B"][0])


def test_no_optimizer_state_is_kept(world: World) -> None:
    """Two moments per number would show as more tensors, or as more numbers, than x and y have."""
    run = opened(world.root / "run")
    for name in run.saved.clients:
        saved = load_file(world.root / "run" / "state" / "clients" / f"{name}.safetensors")
        assert (
            sum(t.numel() for t in saved.values())
            == run.model.common_layout.size + run.model.personal_layout.size
        )
    assert not list((world.root / "run").rglob("*.pt")) and not list((world.root / "run").rglob("*.bin"))
