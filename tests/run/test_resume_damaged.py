"""Checkpoints that were torn or changed, and what is in which of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_runs import COMPARISON, Killed, clocks_standing_still, contents, go_on, killed_at, same
from little_world import SECRETS, World
from safetensors.torch import load_file

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run import snapshot
from pf2lora.run.fingerprint import CannotGoOn

pytestmark = pytest.mark.usefixtures("one_thread")

# --- torn, changed, missing ---------------------------------------------------------------------------------


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


DAMAGE: list[Callable[[Path], None]] = [halved, flipped, emptied, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["manifest.json", "shared.safetensors", "records.json", "clients/south.safetensors"]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    name: str, damage: Callable[[Path], None], begun: World, broken: Path
) -> None:
    last = sorted((broken / "checkpoints").glob("0*"))[-1]
    damage(last / name)
    said: list[str] = []
    run_with_notes(begun, broken, said)
    same(contents(broken), contents(begun.root / "unbroken"))
    gone = (
        name == "manifest.json" and damage is Path.unlink
    )  # as one that was being removed: no snapshot at all
    assert sum("is damaged" in line and "the one before" in line for line in said) == (0 if gone else 1)


def run_with_notes(world: World, out: Path, said: list[str]) -> None:
    from pf2lora.run import api
    from pf2lora.run.config import from_settings
    from pf2lora.run.events import Note

    config = from_settings({**world.settings(**COMPARISON), "out": str(out)})
    api.run(config, out, resume=True, tell=lambda e: said.append(e.line) if isinstance(e, Note) else None)


def test_no_whole_checkpoint_is_an_error_that_touches_nothing(begun: World, broken: Path) -> None:
    for checkpoint in (broken / "checkpoints").glob("0*"):
        flipped(checkpoint / "manifest.json")
    before = contents(broken)
    with pytest.raises(CannotGoOn, match=r"is damaged: manifest.json .*, and there is no other; --force"):
        go_on(begun, broken)
    assert contents(broken) == before


def test_a_finished_methods_record_is_checked_too(begun: World, broken: Path) -> None:
    flipped(broken / "checkpoints" / "finished" / "local-0.json")
    with pytest.raises(CannotGoOn, match=r"finished/local-0.json is not as it was written"):
        go_on(begun, broken)


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest with other words and the digest that fits them."""
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    change(manifest)
    path.write_bytes(snapshot.encoded(manifest | {"sha256": snapshot.digest(manifest)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].update({"../../../etc/hostname": "0"}),
        lambda m: m["files"].update({"/etc/hostname": "0"}),
        lambda m: m.update(format=2),
        lambda m: m.update(about=[]),
        lambda m: m["about"].pop("fingerprint"),
        lambda m: m["about"].update(finished=[["local"]]),
        lambda m: m["about"].update(fingerprint={"settings": 1}),
        lambda m: m["about"]["trial"].update(round="three"),
    ],
)
def test_a_forged_manifest_is_one_line(
    change: Callable[[dict[str, Any]], None], begun: World, broken: Path
) -> None:
    for checkpoint in (broken / "checkpoints").glob("0*"):
        forged(checkpoint / "manifest.json", change)
    with pytest.raises(UserError) as error:
        go_on(begun, broken)
    assert "\n" not in str(error.value) and "is damaged" in str(error.value)


def test_a_checkpoint_of_another_adapter_is_one_line(begun: World, broken: Path) -> None:
    """Every digest fits, and the numbers are not this run's."""
    for checkpoint in (broken / "checkpoints").glob("0*"):
        file = checkpoint / "clients" / "south.safetensors"
        tensors, about = snapshot.unpacked(file.read_bytes())
        file.write_bytes(snapshot.packed(tensors | {"1": torch.zeros(1, 3)}, about))
        digest = snapshot.hashlib.sha256(file.read_bytes()).hexdigest()
        digests = {"clients/south.safetensors": digest}
        forged(checkpoint / "manifest.json", partial(with_digests, digests))
    with pytest.raises(CannotGoOn, match="cannot be used: it does not fit this run"):
        go_on(begun, broken)


def with_digests(digests: dict[str, str], manifest: dict[str, Any]) -> None:
    manifest["files"].update(digests)


# --- what is in which file ----------------------------------------------------------------------------------


def test_the_shared_file_holds_nothing_of_any_client(begun: World, broken: Path) -> None:
    """No y, no head of its own, no moment of the optimizer, no word of its texts, not its name."""
    last = sorted((broken / "checkpoints").glob("0*"))[-1]
    shared = (last / "shared.safetensors").read_bytes() + (last / "manifest.json").read_bytes()
    own = [load_file(file) for file in sorted((last / "clients").iterdir())]
    assert len(own) == 3
    tensors = load_file(last / "shared.safetensors")
    start = tensors["common"].shape[1] - 2 * (32 + 1)  # the head is last, and stays home
    for client in own:
        private = [client["0"][:, start:], client["1"], *(client[k] for k in ("2", "3", "best.personal"))]
        pieces = [chunk for t in private for chunk in chunks(t)]
        assert len(pieces) > 100
        assert not any(piece in shared for piece in pieces)
    for word in (*SECRETS.values(), '"south":'):
        assert word.encode() not in shared


def chunks(tensor: torch.Tensor) -> list[bytes]:
    """Every four numbers as a file would hold them; zeros tell nothing."""
    pieces = tensor.flatten().split(4)
    return [p.numpy().tobytes() for p in pieces if len(p) == 4 and (p != 0).all()]


def test_a_clients_file_holds_its_own_and_nobody_elses(begun: World, broken: Path) -> None:
    last = sorted((broken / "checkpoints").glob("0*"))[-1]
    files = {name: last / "clients" / f"{name}.safetensors" for name in SECRETS}
    for name, file in files.items():
        for other in SECRETS:
            found = all(chunk in file.read_bytes() for chunk in chunks(load_file(files[other])["1"])[:20])
            assert found == (name == other)


def test_what_is_common_is_written_once(begun: World, tmp_path: Path) -> None:
    with pytest.raises(Killed), killed_at(2), clocks_standing_still():
        pf2lora.federate(
            **begun.settings(checkpoint_every=1, rounds=3, method="homlora", out=tmp_path / "run")
        )
    client = load_file(tmp_path / "run" / "checkpoints" / "000001" / "clients" / "south.safetensors")
    assert "0" not in client and "2" in client  # x is the common one; the moments are its own


def test_nobody_else_may_look_into_the_checkpoints(broken: Path) -> None:
    assert all(p.stat().st_mode & 0o077 == 0 for p in (broken / "checkpoints").glob("0*"))
