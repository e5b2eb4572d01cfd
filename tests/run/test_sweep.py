"""A sweep: tries side by side are the separate runs, judged by validation rows, kept, and turned into a run."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, command_line, make_world

import pf2lora
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import tries
from pf2lora.run.comparison import prepare
from pf2lora.run.config import Config, from_settings, from_toml
from pf2lora.run.sweep import combinations, parse_over, sweep
from pf2lora.run.tries import Rates, Try, deployed_loss, groups, on_validation_rows, run_tries
from pf2lora.run.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"rounds": 2, "steps": 2, "validation_ratio": 0.3, "participation": 0.67}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def loaded(world: World) -> Workload:
    return workload_of(world, method=["homlora"])


def config_of(world: World, **changes: Any) -> Config:
    settings = world.settings(**SMALL | changes)
    return from_settings(settings | {"model": str(settings["model"])}, "test")


def workload_of(world: World, **changes: Any) -> Workload:
    return on_validation_rows(prepare(config_of(world, **changes)))


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("method", "over"),
    [
        ("pf2lora", {"lr": [0.001, 0.02], "client_lr": [0.01, 0.3]}),
        ("homlora-ft", {"lr": [0.001, 0.02]}),
        ("per-fedavg", {"adaptation_lr": [0.003, 0.2]}),
        ("centralized", {"lr": [0.001, 0.02], "weight_decay": [0.01, 0.5]}),
    ],
)
def test_tries_side_by_side_are_the_separate_runs(
    method: str, over: dict[str, Any], world: World, loaded: Workload
) -> None:
    """With two seeds and a schedule: one pass of all, one by one, and runs of the package's own front door."""
    config = config_of(world, method=[method], seeds=2, schedule="linear")
    workload = replace(loaded, config=config)
    tried = combinations(workload.config, over)[method]
    assert groups(workload, method, tried) == [tried]
    together, alone = (
        list(run_tries(workload, method, tried, deployed_loss, together=beside)) for beside in (True, False)
    )
    for one, other in zip(together, alone, strict=True):
        assert one.rates == other.rates and one.score == pytest.approx(other.score, abs=1e-6)
        assert one.metrics == pytest.approx(other.metrics, abs=1e-5)
    assert len({round(one.score or 0, 5) for one in together}) == len(together)


def test_a_try_is_the_run_with_its_rates(world: World, loaded: Workload) -> None:
    """Of the package's own front door, with what each client chooses to deploy there."""
    tried = [{"lr": 0.001, "client_lr": 0.3}, {"lr": 0.02, "client_lr": 0.01}]
    workload = replace(loaded, config=config_of(world, method=["pf2lora"]))
    found = list(run_tries(workload, "pf2lora", tried, deployed_loss))
    for one, rates in zip(found, tried):
        run = pf2lora.federate(**world.settings(**SMALL | {"method": "pf2lora"} | rates))
        assert one.score == pytest.approx(deployed_loss(run.methods["pf2lora"].runs[0]), abs=1e-6)


@pytest.mark.parametrize(
    ("method", "tried", "expected"),
    [
        ("pf2lora", [{"client_lr": v} for v in ("auto", 0.1, 0.2)], [1, 2]),
        ("pf2lora", [{"client_lr": v} for v in (0.0, 0.1, 0.2)], [1, 2]),
        ("homlora", [{"lr": v} for v in (0.1, "auto", 0.2)], [2, 1]),  # no number of its own
        ("homlora", [{"lr": "auto", "weight_decay": v} for v in (0.1, 0.2)], [2]),
        ("homlora", [{"rank": 4}, {"rank": 2}], [1, 1]),
        ("homlora", [{"batch_size": b, "lr": lr} for b in (4, 8) for lr in (0.1, 0.2)], [2, 2]),
        ("fedadam", [{"lr": 0.1}, {"lr": 0.2}], [1, 1]),  # the server's rate follows lr
        ("fedadam", [{"lr": v, "server_lr": 0.1, "tau": 0.1} for v in (0.1, 0.2)], [2]),
        ("hetlora", [{"penalty": 0.1}, {"penalty": 0.2}], [1, 1]),
    ],
)
def test_who_is_trained_side_by_side(
    method: str, tried: list[Rates], expected: list[int], world: World, loaded: Workload
) -> None:
    workload = replace(loaded, config=config_of(world, method=[method]))
    assert [len(group) for group in groups(workload, method, tried)] == expected
    early = replace(workload, config=config_of(world, method=[method], patience=1))
    assert [len(group) for group in groups(early, method, tried)] == [1] * len(tried)


def test_a_rate_that_is_left_to_the_model_is_tried_as_what_it_comes_to(loaded: Workload) -> None:
    tried: list[Rates] = [{"lr": 0.02}, {"lr": "auto"}, {"lr": 3e-3}]
    found = {one.rates["lr"]: one.score for one in run_tries(loaded, "homlora", tried, deployed_loss)}
    assert found["auto"] == pytest.approx(found[3e-3], abs=1e-6) and found["auto"] != found[0.02]


def test_a_batch_size_among_the_rates_is_the_runs(loaded: Workload) -> None:
    """What is no method's own is the same for all of a group."""
    tried = [{"batch_size": 4, "lr": 0.01}, {"batch_size": 4, "lr": 0.02}]
    together, alone = (
        list(run_tries(loaded, "homlora", tried, deployed_loss, together=beside)) for beside in (True, False)
    )
    assert [one.score for one in together] == pytest.approx([one.score for one in alone], abs=1e-6)


def test_a_try_that_breaks_off_is_left_out_and_the_others_stay(loaded: Workload) -> None:
    tried = [{"lr": 0.01}, {"lr": 1e30}, {"lr": 0.02}]
    found = {one.rates["lr"]: one for one in run_tries(loaded, "homlora", tried, deployed_loss)}
    assert found[1e30].score is None and "bad in round" in found[1e30].failed
    good = list(run_tries(loaded, "homlora", [tried[0], tried[2]], deployed_loss))
    assert [found[0.01].score, found[0.02].score] == pytest.approx([one.score for one in good], abs=1e-9)


def test_where_memory_ends_the_pass_is_halved(loaded: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def little_memory(workload: Any, method: str, group: Sequence[Rates], judged: Any) -> list[Try]:
        sizes.append(len(group))
        if len(group) > 1 or group[0]["lr"] == 0.4:
            raise torch.cuda.OutOfMemoryError
        return [Try(group[0], group[0]["lr"])]

    monkeypatch.setattr(tries, "run_group", little_memory)
    tried = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)]
    found = list(run_tries(loaded, "homlora", tried, deployed_loss))
    assert sizes == [4, 2, 1, 1, 2, 1, 1]
    assert [one.score for one in found] == [0.1, 0.2, 0.3, None] and "memory" in found[-1].failed


def test_test_rows_take_no_part(world: World) -> None:
    """What a try sees in their place are validation rows; a client without any gets no say."""
    whole = prepare(config_of(world))
    none = [replace(whole.clients[0], validation=[]), *whole.clients[1:]]
    given = on_validation_rows(replace(whole, clients=none))
    assert [c.test for c in given.clients] == [none[0].train[:1], none[1].validation, none[2].validation]
    assert given.test.sizes() == [len(c.test) for c in given.clients]
    with pytest.raises(UserError, match="tries are judged by validation rows, and there are none"):
        workload_of(world, validation_ratio=0)


# --- what is asked for --------------------------------------------------------------------------------------


def test_over_is_read() -> None:
    assert parse_over(["lr=1e-4,3e-4", "--client-lr = auto,0.1", "batch-size=4,8"]) == {
        "lr": [1e-4, 3e-4],
        "client_lr": ["auto", 0.1],
        "batch_size": [4, 8],
    }
    for wrong in ("lr", "lr=", "=1", "lr=1,,2"):
        with pytest.raises(UserError, match="such as --over lr=1e-4,3e-4,1e-3"):
            parse_over([wrong])
    with pytest.raises(UserError, match="names lr twice"):
        parse_over(["lr=1", "lr=2"])


def test_each_method_tries_what_it_has(world: World, loaded: Workload) -> None:
    config = config_of(world, method=["pf2lora", "homlora"])
    found = combinations(config, {"lr": [1, 2], "client_lr": ["auto", 0.5]})
    assert found == {
        "pf2lora": [{"lr": lr, "client_lr": own} for lr in (1.0, 2.0) for own in ("auto", 0.5)],
        "homlora": [{"lr": 1.0}, {"lr": 2.0}],
    }
    assert isinstance(found["homlora"][0]["lr"], float)
    for over, message in (
        ({"learning_rate": [1]}, "name in --over 'learning_rate'"),
        ({"seed": [1, 2]}, "name in --over 'seed'"),
        ({"adaptation_lr": [1, 2]}, "name in --over 'adaptation_lr'"),
        ({"max_length": [16, 32]}, "name in --over 'max_length'"),
        ({"batch_size": [4, 8]}, "a setting of all methods at once"),
        ({"client_lr": ["much"]}, "must be a number or auto, not 'much'"),
    ):
        with pytest.raises(UserError, match=message):
            list(groups(loaded, "pf2lora", combinations(config, over)["pf2lora"]))


# --- from beginning to end ----------------------------------------------------------------------------------


def test_a_sweep_that_was_broken_off_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = config_of(world, method=["homlora"]), tmp_path / "sweep"
    over = {"lr": [0.001, 0.01, 0.02]}
    expected = sweep(config, over, tmp_path / "whole")
    honest, ran = tries.run_group, list[float]()

    def broken(workload: Any, method: str, group: Sequence[Rates], judged: Any) -> list[Try]:
        ran.extend(rates["lr"] for rates in group)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return honest(workload, method, group, judged)

    monkeypatch.setattr(tries, "run_group", broken)
    with pytest.raises(KeyboardInterrupt):
        sweep(config, over, out)
    assert [t["rates"] for t in json.loads((out / "sweep.json").read_text())["tries"]] == [{"lr": 0.001}]
    with pytest.raises(UserError, match="holds a sweep; --resume goes on with it"):
        sweep(config, over, out)
    found = sweep(config, over, out, resume=True)
    assert ran == [0.001, 0.01, 0.01, 0.02]
    assert [t.score for t in found.searches[0].tries] == [t.score for t in expected.searches[0].tries]
    more = sweep(config, {"lr": [0.03, *over["lr"]]}, out, resume=True)
    assert ran[4:] == [0.03] and len(more.searches[0].tries) == 4
    with pytest.raises(UserError, match=r"other settings \(training.steps was 2 and is 3\)"):
        sweep(config_of(world, method=["homlora"], steps=3), over, out, resume=True)
    sweep(config_of(world, method=["homlora"], steps=3), {"lr": [0.01]}, out, force=True)
    assert ran[5:] == [0.01]


def test_from_python_with_rows_in_memory(world: World, tmp_path: Path) -> None:
    """Its rates are what `federate` takes, and without a folder nothing is kept."""
    rows = {path.stem: [json.loads(line) for line in path.open()] for path in world.clients}
    settings = world.settings(**SMALL | {"method": "homlora"}) | {"clients": rows}
    told: list[tuple[str, int, int]] = []
    found = pf2lora.sweep(
        **settings,
        over={"lr": [0.001, 0.02]},
        on_try=lambda method, tried, number, of: told.append((method, number, of)),
    )
    assert told == [("homlora", 1, 2), ("homlora", 2, 2)]
    assert found.rates == {"homlora": found.searches[0].chosen} and found.rates["homlora"]["lr"] in (
        0.001,
        0.02,
    )
    run = pf2lora.federate(**settings, methods=found.rates, log="none")
    assert run.config["methods"] == found.rates
    best = found.searches[0].best
    assert best is not None
    assert best.score == pytest.approx(deployed_loss(run.methods["homlora"].runs[0]), abs=1e-6)
    with pytest.raises(UserError, match=r"sweep\(\): out is empty"):
        pf2lora.sweep(**settings, over={"lr": [0.1]}, out=" ")


def test_the_command(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Two methods; its table, its files, and the run that they describe."""
    out = tmp_path / "sweep"
    flags = ["--method", "pf2lora", "homlora", "--rounds", 2, "--steps", 2, "--validation-ratio", 0.3]
    over = ["--over", "lr=0.001,0.02", "--over", "client-lr=0.1,auto"]
    code, said, _ = command_line(
        monkeypatch, capsys, "sweep", *world.base, *flags, *over, "--together", "--out", out
    )
    assert code == 0 and "try 6 of 6: HOMLoRA with lr " in said
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert [(row["method"], row["client_lr"]) for row in rows] == [
        *(("pf2lora", own) for _ in (1, 2) for own in ("0.1", "auto")),
        *(("homlora", ""),) * 2,
    ]
    chosen = from_toml(out / "chosen.toml")
    for method in ("pf2lora", "homlora"):
        own = [row for row in rows if row["method"] == method]
        best = min(own, key=lambda row: float(row["validation_loss"]))
        assert [row["chosen"] for row in own] == ["yes" if row is best else "" for row in own]
        assert str(chosen.methods[method]["lr"]) == best["lr"]
        label = METHODS[method].label
        assert f"{label}: lr {float(best['lr']):g}" in said
    assert "lr is at an end of what was tried" in said
    assert f"pf2lora compare {out / 'chosen.toml'}" in " ".join(said.split())
    assert chosen.output.out == "" and chosen.training.method == ("pf2lora", "homlora")
    code, said, _ = command_line(
        monkeypatch, capsys, "compare", out / "chosen.toml", "--out", tmp_path / "run"
    )
    assert code == 0


def test_what_cannot_be_swept_is_one_line(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def said(*more: Any) -> str:
        code, _, error = command_line(monkeypatch, capsys, "sweep", *world.base, *more)
        assert code == 2 and len(error.strip().splitlines()) == 1
        return error

    assert "name in --over 'lrr'" in said("--over", "lrr=1,2", "--out", tmp_path / "a")
    assert "the stated ε of one run" in said("--dp-epsilon", 8, "--out", tmp_path / "b")
    shutil.copytree(world.root / "clients", tmp_path / "c")
    assert "holds data" in said("--out", tmp_path / "c")
    assert "give one of them" in said("--force", "--resume", "--out", tmp_path / "d")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_where_every_try_breaks_off_it_says_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    flags = ["--method", "homlora", "--rounds", 1, "--validation-ratio", 0.3, "--over", "lr=1e30,1e31"]
    code, said, _ = command_line(
        monkeypatch, capsys, "sweep", *world.base, *flags, "--out", tmp_path / "sweep"
    )
    assert code == 2 and "failed HOMLoRA: client" in " ".join(said.split())
    assert not (tmp_path / "sweep" / "chosen.toml").exists()
