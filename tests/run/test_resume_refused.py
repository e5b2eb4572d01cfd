"""What a run may not go on with, in one line that names it; what was torn or changed; and what is in which file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken_runs import Killed, clocks_standing_still, contents, killed_at, same
from little_world import SECRETS, World, command_line, make_world
from safetensors.torch import load_file

import pf2lora
from pf2lora.adapters.base_model import weights_digest
from pf2lora.errors import UserError
from pf2lora.run import fingerprint, made_with, snapshot
from pf2lora.run.fingerprint import CannotGoOn

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "steps": 1,
    "evaluate_every": 2,
    "validation_ratio": 0.2,
    "checkpoint_every": 1,
    "method": ["local", "pf2lora"],
    "head": "personal",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with a comparison that was broken off in the second method's fourth round, and its unbroken twin."""
    world = make_world(tmp_path_factory.mktemp("world"))
    with clocks_standing_still():
        pf2lora.federate(**world.settings(**SETTINGS, out=world.root / "run"))
        (world.root / "run").rename(world.root / "unbroken")
        with pytest.raises(Killed), killed_at(8):
            pf2lora.federate(**world.settings(**SETTINGS, out=world.root / "run"))
    return world


@pytest.fixture
def broken(begun: World, tmp_path: Path) -> Iterator[Path]:
    """The broken-off run, as it was, at its own place: what a test does to it is undone."""
    out = begun.root / "run"
    shutil.copytree(out, tmp_path / "kept")
    with clocks_standing_still():
        yield out
    shutil.rmtree(out)
    shutil.copytree(tmp_path / "kept", out)


def go_on(world: World, out: Path, **changes: Any) -> Any:
    return pf2lora.federate(**world.settings(**SETTINGS | changes, out=out), resume=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.5}, r"other settings \(training.lr was 0.001 and is 0.5\)"),
        ({"rank": 2, "client_rank": 1}, r"other settings \(adapter.rank was 4 and is 2\)"),
        ({"max_length": 8}, r"other settings \(task.max_length was 16 and is 8\)"),
        ({"seed": 1}, r"training.seed was 0 and is 1"),
        ({"patience": 3}, r"training.patience was None and is 3"),
        ({"methods": {"local": {"lr": 0.1}}}, r"methods.local was None and is"),
        ({"method": ["local", "homlora"]}, r"other methods \(local, pf2lora; now local, homlora\)"),
        ({"method": "pf2lora"}, r"other methods"),
        ({"validation_ratio": 0.3}, r"other rows \(data.validation_ratio was 0.2 and is 0.3\)"),
        ({"rounds": 8}, r"rounds was 4 and is 8, and local has finished with 4"),
    ],
)
def test_other_settings_are_refused_by_name(
    changes: dict[str, Any], named: str, begun: World, broken: Path
) -> None:
    before = contents(broken)
    with pytest.raises(CannotGoOn, match=named):
        go_on(begun, broken, **changes)
    assert contents(broken) == before


def test_other_rows_are_refused_and_their_client_is_named(begun: World, broken: Path) -> None:
    file = begun.root / "clients" / "south.jsonl"
    text = file.read_text()
    file.write_text(text.replace("film", "story", 1))
    try:
        with pytest.raises(CannotGoOn, match=r"other rows \(those of client 'south' have changed\)"):
            go_on(begun, broken)
    finally:
        file.write_text(text)


def test_other_weights_are_refused(begun: World, broken: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    other = tmp_path / "model"
    shutil.copytree(begun.model, other)
    model = AutoModelForSequenceClassification.from_pretrained(other)
    with torch.no_grad():
        next(model.parameters())[7, 3] += 1e-3
    model.save_pretrained(other)
    with pytest.raises(CannotGoOn, match=r"other weights \(model.name was '.*' and is '.*'\)"):
        go_on(begun, broken, model=str(other))


def test_any_changed_number_changes_the_weights_digest() -> None:
    weights = {"a": torch.randn(100, 70), "b": torch.arange(5), "c": torch.tensor([True, False])}

    def digest(**changes: torch.Tensor) -> str:
        model: Any = SimpleNamespace(state_dict=lambda: weights | changes)
        return weights_digest(model)

    first = digest()
    for name, at in (("a", (3, 3)), ("a", (99, 69)), ("b", 4)):
        changed = weights[name].clone()
        changed[at] += 1
        assert digest(**{name: changed}) != first
    assert digest(a=weights["a"].t().contiguous().view(100, 70)) != first
    assert digest(c=torch.tensor([True, True])) != first
    assert digest(a=weights["a"].clone()) == first


@pytest.mark.parametrize("package", ["pf2lora", "torch", "transformers"])
def test_another_version_is_refused(
    package: str, begun: World, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = made_with.versions() | {package: "99.0"}
    monkeypatch.setattr(fingerprint, "versions", lambda: now)
    with pytest.raises(CannotGoOn, match=f"it was begun with {package} .*, and this is 99.0"):
        go_on(begun, broken)


def test_another_device_is_refused_and_other_threads_are_said(
    begun: World, broken: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_with = fingerprint.fingerprint

    def elsewhere(*args: Any) -> Any:
        return replace(begun_with(*args), device="cuda")

    monkeypatch.setattr("pf2lora.run.checkpoints.fingerprint", elsewhere)
    with pytest.raises(CannotGoOn, match="begun on cpu, and this is cuda"):
        go_on(begun, broken)
    monkeypatch.undo()
    torch.set_num_threads(2)
    args = ["compare", broken / "config.toml", "--clients-per-pass", 1, "--resume"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    said = " ".join(out.split())
    assert code == 0 and "it was begun with 1 threads, and now has 2: same up to rounding" in said
    assert "clients_per_pass was all and is 1: same up to rounding" in said


@pytest.mark.parametrize(
    ("rounds", "every", "problem"),
    [
        (8, 2, None),
        (8, None, "other ones would be measured: give --evaluate-every 2"),
        (3, 2, "it has done 3 already"),
        (4, 3, "other ones would be measured"),
        (40, 2, None),
    ],
)
def test_which_numbers_of_rounds_are_safe(rounds: int, every: int | None, problem: str | None) -> None:
    from pf2lora.run.config import from_settings, to_dict

    then = to_dict(from_settings({"rounds": 4, "evaluate_every": 2}))
    now = from_settings({"rounds": rounds} | ({"evaluate_every": every} if every else {}))
    if problem is None:
        fingerprint.check_rounds(then, now, reached=3, finished=[])
    else:
        with pytest.raises(CannotGoOn, match=problem):
            fingerprint.check_rounds(then, now, reached=3, finished=[])


def test_what_changes_no_number_may_change(begun: World, broken: Path, tmp_path: Path) -> None:
    """A moved model and data folder, another title, other checkpoints."""
    shutil.copytree(begun.model, tmp_path / "model")
    shutil.copytree(begun.root / "clients", tmp_path / "clients")
    files = sorted(str(p) for p in (tmp_path / "clients").glob("*.jsonl"))
    moved = {"model": str(tmp_path / "model"), "clients": files, "title": "Mine", "keep_checkpoints": 5}
    go_on(begun, broken, **moved)
    expected = contents(begun.root / "unbroken")
    for name, data in contents(broken).items():
        if name.endswith(".safetensors"):
            assert data == expected[name]
    assert json.loads((broken / "result.json").read_text())["title"] == "Mine"


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

    config = from_settings({**world.settings(**SETTINGS), "out": str(out)})
    api.run(config, out, resume=True, on_note=said.append)


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


# --- the folder ---------------------------------------------------------------------------------------------


def test_an_ended_run_is_left_as_it_is(begun: World, broken: Path) -> None:
    go_on(begun, broken)
    before = contents(broken)
    same(before, contents(begun.root / "unbroken"))
    result = go_on(begun, broken)
    assert contents(broken) == before and list(result.methods) == ["local", "pf2lora"]
    with pytest.raises(CannotGoOn, match=r"no checkpoints, and is of other settings \(training.rounds was 4"):
        go_on(begun, broken, rounds=9)
    assert contents(broken) == before


def test_force_and_resume_exclude_each_other_and_resume_needs_a_folder(begun: World, broken: Path) -> None:
    settings = begun.settings(**SETTINGS)
    with pytest.raises(UserError, match="--force starts anew and --resume goes on: give one of them"):
        pf2lora.federate(**settings, out=broken, resume=True, force=True)
    with pytest.raises(UserError, match="leaves nothing to go on from: give out beside resume"):
        pf2lora.federate(**settings, resume=True)


def test_a_comparison_without_its_checkpoints_is_not_thrown_away(begun: World, broken: Path) -> None:
    shutil.rmtree(broken / "checkpoints")
    with pytest.raises(CannotGoOn, match="has no checkpoints, and has not finished pf2lora"):
        go_on(begun, broken)


def test_without_resume_a_broken_off_run_is_refused_and_force_replaces_it(begun: World, broken: Path) -> None:
    (broken / "checkpoints" / "mine.txt").write_text("a user's own")
    settings = begun.settings(**SETTINGS, out=broken)
    with pytest.raises(UserError, match="holds another run"):
        pf2lora.federate(**settings)
    pf2lora.federate(**settings, force=True)
    assert contents(broken / "checkpoints") == {"mine.txt": b"a user's own"}


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
