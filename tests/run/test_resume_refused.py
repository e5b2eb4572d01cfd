"""What a run may go on with and what not, in one line that names it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken_runs import COMPARISON, contents, go_on, same
from little_world import World, command_line

import pf2lora
from pf2lora.adapters.base_model import weights_digest
from pf2lora.errors import UserError
from pf2lora.run import fingerprint, made_with
from pf2lora.run.fingerprint import CannotGoOn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.5}, r"other settings \(training.lr was 'auto' and is 0.5\)"),
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
    assert "clients_per_pass was auto and is 1: same up to rounding" in said


@pytest.mark.parametrize("how", [{"schedule": "linear"}, {"warmup": 0.1}])
def test_other_rounds_are_refused_where_rates_have_a_schedule(how: dict[str, Any]) -> None:
    from pf2lora.run.config import from_settings, to_dict

    then = to_dict(from_settings({"rounds": 4, "evaluate_every": 2} | how))
    with pytest.raises(CannotGoOn, match="rounds was 4 and is 8, and the schedule of its rates is that of 4"):
        fingerprint.check_rounds(
            then, from_settings({"rounds": 8, "evaluate_every": 2} | how), reached=3, finished=[]
        )
    fingerprint.check_rounds(
        then, from_settings({"rounds": 4, "evaluate_every": 2} | how), reached=3, finished=[]
    )


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
    settings = begun.settings(**COMPARISON)
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
    settings = begun.settings(**COMPARISON, out=broken)
    with pytest.raises(UserError, match="holds another run"):
        pf2lora.federate(**settings)
    pf2lora.federate(**settings, force=True)
    assert contents(broken / "checkpoints") == {"mine.txt": b"a user's own"}
