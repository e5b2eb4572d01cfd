"""The main job on a small world: train, compare, what they write, what they warn of, and when they stop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from little_world import LEARNING, World, command_line, make_world, write_csv, write_jsonl
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import pf2lora
from pf2lora.engines.stepper import PlainStepper
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import trial
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_toml
from pf2lora.run.result import SentBytes, load_result
from pf2lora.run.result_check import check

NAMES = ["north", "south", "west"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_folder_has_everything(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = tmp_path / "run"
    code, out, _ = command_line(
        monkeypatch, capsys, "train", *world.base, "--out", run, "--title", "My clients"
    )
    assert code == 0 and "My clients" in out and "report.html" in out and "3 clients" in out
    assert sorted(p.name for p in run.iterdir()) == [
        *("clients", "common", "config.toml", "metrics.jsonl", "report.html", "result.json", "state")
    ]
    config = from_toml(run / "config.toml")
    assert (config.model.name, config.adapter.rank, config.output.out) == (str(world.model), 4, str(run))
    result = load_result(run)
    assert [c.name for c in result.clients] == NAMES and result.title == "My clients"
    assert [(c.train, c.test) for c in result.clients] == [(48, 12), (64, 16), (80, 20)]
    assert [sum(c.labels.values()) for c in result.clients] == [48, 64, 80]
    assert list(result.metrics) == ["accuracy", "matthews", "loss"]
    (seed,) = result.methods["pf2lora"].runs
    for point in ("served", "before_averaging"):
        assert set(getattr(seed, point)) == {"accuracy", "matthews", "loss"}
    recorded = [{k: v for k, v in line.items() if k not in ("method", "seed", "time")} for line in lines(run)]
    assert recorded == [{k: v for k, v in asdict(r).items() if k != "ranks"} for r in seed.rounds]
    assert len(seed.rounds[-1].ranks or []) == 3 and len(seed.layers) == 4
    for folder in (run / "common", *(run / "clients" / name for name in NAMES)):
        base = AutoModelForSequenceClassification.from_pretrained(world.model, num_labels=2)
        PeftModel.from_pretrained(base, str(folder))
    html = (run / "report.html").read_text()
    assert "My clients" in html and "http://" not in html.replace("http://www.w3.org", "")


def test_metrics_are_written_as_they_happen(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = trial.round_records

    def watched(*args: Any) -> Any:
        file = tmp_path / "run" / "metrics.jsonl"
        seen.append(len(file.read_text().splitlines()) if file.exists() else 0)
        return original(*args)

    monkeypatch.setattr(trial, "round_records", watched)
    pf2lora.federate(**world.settings(rounds=3, out=tmp_path / "run"))
    assert seen == [0, 1, 2]


def test_csv_a_client_column_and_test_files_give_the_same_clients(world: World, tmp_path: Path) -> None:
    """The same rows, however they are laid out in files."""
    rows = {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in world.clients}
    for name, all_rows in rows.items():
        write_csv(tmp_path / "csv" / f"{name}.csv", all_rows)
        write_jsonl(tmp_path / "train" / f"{name}.jsonl", all_rows[:40])
        write_csv(tmp_path / "test" / f"{name}.csv", all_rows[40:])
    write_csv(tmp_path / "all.csv", [row | {"site": name} for name, r in rows.items() for row in r])
    wanted = prepare_clients(world.settings())
    assert prepare_clients(world.settings(clients=str(tmp_path / "csv" / "*.csv"))) == wanted
    assert prepare_clients(world.settings(clients=str(tmp_path / "csv"))) == wanted
    assert prepare_clients(world.settings(clients=str(tmp_path / "all.csv"), client_column="site")) == wanted
    apart = prepare_clients(
        world.settings(clients=str(tmp_path / "train"), test=[str(tmp_path / "test" / "*.csv")])
    )
    assert [(c.name, len(c.train), len(c.test)) for c in apart] == [
        ("north", 40, 20),
        ("south", 40, 40),
        ("west", 40, 60),
    ]


def prepare_clients(settings: dict[str, Any]) -> list[Any]:
    from pf2lora.run import api

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "run", lambda config, out, **rest: seen.append(config))
        api.federate(**settings)
    return prepare(seen[0]).clients


def test_compare_two_methods_over_two_seeds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = tmp_path / "run"
    args = ["compare", *world.base, "--method", "pf2lora", "local", "--seeds", 2, "--seed", 5, "--out", run]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and "±" in out and "2 seeds" in out
    result = load_result(run)
    assert {m: [r.seed for r in v.runs] for m, v in result.methods.items()} == {
        "pf2lora": [5, 6],
        "local": [5, 6],
    }
    assert result.methods["local"].runs[0].before_averaging is None
    assert [(r["method"], r["seed"], r["round"]) for r in lines(run)] == [
        (method, seed, number) for method in ("pf2lora", "local") for number in (1, 2) for seed in (5, 6)
    ]
    assert (run / "methods" / "pf2lora" / "common" / "adapter_config.json").exists()
    assert not (run / "methods" / "local" / "common").exists()  # nothing is shared
    for name in NAMES:
        assert (run / "methods" / "local" / "clients" / name / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_runs_and_costs_what_it_costs(method: str, world: World, tmp_path: Path) -> None:
    result = pf2lora.federate(**world.settings(method=method, rounds=1, out=tmp_path / "run"))
    (run,) = load_result(tmp_path / "run").methods[method].runs
    assert (run.flops_per_round or 0) > 0 and (run.peak_memory_bytes or 0) > 0
    sent, parameters = run.bytes_per_round, run.parameters
    assert parameters.head == 2 * 32 + 2
    if method in ("centralized", "local"):
        assert sent == SentBytes(0, 0)
    else:
        # of the adapter and of the head
        shares = {"ffa-lora": (0.5, 1), "rolora": (0.5, 1), "fedsa-lora": (0.5, 0), "scaffold": (2, 2)}
        of_adapter, of_head = shares.get(method, (1, 1))
        assert sent.head == of_head * 4 * parameters.head
        full = 4 * 4 * 2 * 32 * 4  # four layers, A and B of rank 4, float32
        assert (
            sent.adapter == of_adapter * full
            if method not in ("hetlora", "flexlora")
            else full <= sent.adapter <= 1.5 * full
        )
    assert (parameters.client > 0) == (METHODS[method].two_level or method == "ditto")
    served = tmp_path / "run" / ("common" if method == "centralized" else "clients/west")
    rank = json.loads((served / "adapter_config.json").read_text())["r"]
    both = {"pf2lora": 6, "pf2lora-joint": 6, "feddpa-t": 8, "feddpa-f": 8}
    assert rank == (both | {"hetlora": 6, "flexlora": 6, "fedex-lora": 16}).get(method, 4)
    assert result.methods[method].label


def test_personal_adapters_learn_what_an_average_cannot(world: World) -> None:
    """To one client the words mean the opposite: a common model cannot serve it, its own adapter can."""
    settings = world.settings(**LEARNING, method=["pf2lora", "homlora"])
    result = pf2lora.federate(**settings)
    worst = {name: result.served("accuracy", name).worst or 0 for name in result.methods}
    assert worst["pf2lora"] > 0.8 and worst["homlora"] < 0.5


def test_the_same_seed_gives_the_same_run(world: World, tmp_path: Path) -> None:
    for name in ("one", "two"):
        pf2lora.federate(**world.settings(out=tmp_path / name))
    pf2lora.federate(**world.settings(out=tmp_path / "other", seed=1))
    files = [
        load_file(tmp_path / n / "common" / "adapter_model.safetensors") for n in ("one", "two", "other")
    ]
    assert all(files[0][key].equal(files[1][key]) for key in files[0])
    assert not all(files[0][key].equal(files[2][key]) for key in files[0])


@pytest.mark.parametrize("method", ["pf2lora", "per-fedavg", "hetlora"])
def test_clients_in_several_passes_end_and_score_alike(method: str, world: World) -> None:
    whole, parts = (
        pf2lora.federate(**world.settings(method=method, rounds=2, clients_per_pass=per_pass))
        .methods[method]
        .runs[0]
        for per_pass in (None, 2)
    )
    for a, b in zip(whole.rounds, parts.rounds):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)
    assert whole.served["loss"].per_client == pytest.approx(parts.served["loss"].per_client, abs=1e-5)


def test_a_risen_loss_is_warned_of(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    args = ["train", *world.base, "--method", "homlora", "--lr", 3, "--rounds", 3, "--out", tmp_path / "run"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    (run,) = load_result(tmp_path / "run").methods["homlora"].runs
    rose = [r for r in run.warnings if "the training loss rose above its start" in r]
    first, last = run.rounds[0].train_loss, run.rounds[-1].train_loss
    expected = [name for name, a, b in zip(NAMES, first, last) if a is not None and b is not None and b > a]
    assert [line.split("'")[1] for line in rose] == expected and expected
    assert code == 0 and "warning" in out and expected[0] in out


def test_an_own_adapter_that_stands_still_is_warned_of(world: World) -> None:
    (still,) = pf2lora.federate(**world.settings(client_lr=0)).methods["pf2lora"].runs
    stopped = [line for line in still.warnings if "stopped moving" in line]
    assert [line.split("'")[1] for line in stopped] == NAMES
    settings = world.settings(client_lr=0.5, hypergradient_mode="none")
    (moving,) = pf2lora.federate(**settings).methods["pf2lora"].runs
    assert not any("stopped moving" in line for line in moving.warnings)


def test_a_client_that_sat_out_the_last_round_has_not_stopped_moving(world: World) -> None:
    settings = world.settings(client_lr=0.5, participation=0.3, rounds=6)
    (run,) = pf2lora.federate(**settings).methods["pf2lora"].runs
    absent = [r.train_loss.count(None) for r in run.rounds]
    assert absent == [2] * 6
    assert not any("stopped moving" in line for line in run.warnings)


def test_a_loss_that_is_no_number_stops_the_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Said with client, round and step; what was measured before is kept."""
    original = trial.train

    def breaks(method: Any, F: Any, *args: Any, **options: Any) -> Any:
        calls = [0]

        def loss(x: Any, y: Any, batch: Any) -> Any:
            calls[0] += 1
            value = F(x, y, batch)
            return value if calls[0] < 6 else value * float("nan")

        return original(method, loss, *args, **options | {"stepper": PlainStepper(loss)})

    monkeypatch.setattr(trial, "train", breaks)
    run = tmp_path / "run"
    args = ["train", *world.base, "--method", "homlora", "--rounds", 9, "--out", run]
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and err.count("\n") == 1
    assert "client 'north' is bad in round 3: its loss became nan in local step 2" in err
    assert [line["round"] for line in lines(run)] == [1, 2]
    assert load_result(run).failed and load_result(run).methods["homlora"].runs == []


def test_a_mistake_in_the_last_method_is_said_before_the_first_is_trained(
    world: World, tmp_path: Path
) -> None:
    settings = world.settings(method=["pf2lora", "hetlora"], out=tmp_path / "run")
    for table, message in (
        ({"gama": 0.5}, r"\[methods.hetlora\]: unknown key 'gama'; did you mean 'gamma'"),
        ({"gamma": "much"}, r"\[methods.hetlora\]: gamma must be of type float, not 'much'"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"r_max": 99}, "rank 99 is above the size of layer"),
        ({"client_rank": 1}, "unknown key 'client_rank'"),
    ):
        with pytest.raises(UserError, match=message):
            pf2lora.federate(**settings, methods={"hetlora": table})
    assert not (tmp_path / "run").exists()


def test_a_method_has_settings_of_its_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[methods.hetlora]\nr_max = 8\nr_min = 2\n[methods.pf2lora]\nclient_rank = 1\n")
    args = ["compare", config, *world.base, "--method", "hetlora", "pf2lora", "--out", tmp_path / "run"]
    assert command_line(monkeypatch, capsys, *args)[0] == 0
    for method, rank in (("hetlora", 8), ("pf2lora", 4 + 1)):
        folder = tmp_path / "run" / "methods" / method / "clients" / "north"
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank


def test_inputs_longer_than_the_model_takes(world: World, tmp_path: Path) -> None:
    rows = [{"text": "the " * 60, "label": label} for label in ("pos", "neg") * 4]
    file = write_jsonl(tmp_path / "long.jsonl", rows)
    settings = world.settings(clients=[str(file)]) | {"max_length": 50}
    with pytest.raises(UserError, match=r"an input has 50 tokens, .* takes 32: give --max-length 32"):
        pf2lora.federate(**settings)
    pf2lora.federate(**settings | {"max_length": 32, "rounds": 1})


def test_federate_without_a_folder_writes_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = pf2lora.federate(**world.settings(method="homlora", seeds=2))
    check(result, "federate()")
    assert list(tmp_path.iterdir()) == []
