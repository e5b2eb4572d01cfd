"""The scripts of the real runs: any method of the package, trained by the package, one row each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_tasks import write_generation_task, write_question_task

from pf2lora import federate
from pf2lora.methods import METHODS
from pf2lora.run.set_up import method_settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHORT: dict[str, Any] = {"rounds": 2, "steps": 2, "batch_size": 2, "rank": 4, "client_rank": 2, "lr": 0.02}
ROW = {
    *(
        "scores",
        "before_averaging",
        "per_client",
        "train_loss",
        "train_seconds",
        "evaluation_seconds",
        "outputs",
    ),
}


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    import importlib

    sys.path.insert(0, str(BENCHMARKS))
    try:
        return {
            name: importlib.import_module(name) for name in ("package_runs", "real_qa", "real_generation")
        }
    finally:
        sys.path.remove(str(BENCHMARKS))


def flags(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def check_rows(found: dict[str, Any], file: Path, clients: int) -> None:
    """A row for both methods, on the disk as it was returned; only the federated one has a point before the average."""
    assert list(found["methods"]) == ["hetlora", "centralized"]
    assert json.loads(file.read_text()) == found
    for row in found["methods"].values():
        assert set(row) == ROW
        assert len(row["per_client"]) == clients and len(row["train_loss"]) == SHORT["rounds"]
        assert [len(texts) for texts in row["outputs"]] == [client["test"] for client in found["clients"]]
    assert found["methods"]["hetlora"]["before_averaging"] is not None
    assert found["methods"]["centralized"]["before_averaging"] is None


def test_question_answering_trains_hetlora_and_the_pooled_learner(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    model, files = write_question_task(tmp_path, ["north", "south"])
    out, summary = tmp_path / "qa.json", tmp_path / "results" / "qa.json"
    own = SHORT | {"max_length": 32, "stride": 4}
    clients = [str(file) for file in files]
    arguments = [
        "--model",
        str(model),
        "--method",
        "hetlora",
        "centralized",
        "--device",
        "cpu",
        "--clients",
        *clients,
    ]
    places = ["--out", str(out), "--summary", str(summary)]
    found = scripts["real_qa"].main([*arguments, *places, *flags(own)])
    check_rows(found, out, clients=2)
    assert "items" not in json.loads(summary.read_text())
    # Centralized is the package's pooled method, to the last digit.
    assert METHODS["centralized"].pooled
    result = federate(
        model=model, task="question-answering", clients=clients, method="centralized", device="cpu", **own
    )
    (run,) = result.methods["centralized"].runs
    row = found["methods"]["centralized"]
    assert row["scores"] == {metric: over.mean for metric, over in run.served.items()}
    losses = [[loss for loss in r.train_loss if loss is not None] for r in run.rounds]
    assert row["train_loss"] == [sum(both) / 2 for both in losses]


def test_generation_trains_both_and_is_scored_again_elsewhere(
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("sacrebleu")
    monkeypatch.setenv("PATH", "")  # no Java
    model, files = write_generation_task(tmp_path, ["north", "south", "west"])
    out = tmp_path / "e2e.json"
    own = SHORT | {"max_length": 96, "max_new_tokens": 6, "beams": 2}
    arguments = ["--model", str(model), "--method", "hetlora", "centralized", "--device", "cpu"]
    few = ["--first-clients", "2", "--test-limit", "1", "--clients", *map(str, files)]
    found = scripts["real_generation"].main(["e2e", *arguments, *few, "--out", str(out), *flags(own)])
    check_rows(found, out, clients=2)
    assert [client["test"] for client in found["clients"]] == [1, 1]
    assert any(note.startswith("no METEOR") for note in found["notes"])
    scores = found["methods"]["hetlora"]["scores"]
    assert scores["BLEU"] is not None and scores["METEOR"] is None
    found["methods"]["hetlora"]["scores"]["BLEU"] = found["methods"]["hetlora"]["per_client"][0]["BLEU"] = (
        None
    )
    out.write_text(json.dumps(found))
    capsys.readouterr()
    scripts["real_generation"].rescore(out, None)
    again = json.loads(out.read_text())
    assert again["methods"]["hetlora"]["scores"]["BLEU"] is not None
    assert again["notes"] == found["notes"] and "| hetlora |" in capsys.readouterr().out


def test_every_setting_reaches_the_run(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    """Flags win over the file, the file over the script; `[methods.NAME]` reaches its method."""
    file = tmp_path / "run.toml"
    file.write_text("[training]\nlr = 0.5\nrounds = 7\n[methods.per-fedavg]\nadaptation_lr = 0.25\n")
    given = [
        "--model",
        "m",
        "--out",
        "o.json",
        "--config",
        str(file),
        "--rounds",
        "9",
        "--precision",
        "bfloat16",
    ]
    options = scripts["package_runs"].parser(None, "question-answering")
    real_qa = scripts["real_qa"]
    parsed = options.parse_args([*given, "--method", "per-fedavg", "--no-graphs", "--weight-decay", "0"])
    config = scripts["package_runs"].config_of(parsed, real_qa.TASK, real_qa.DEFAULTS)
    assert (config.training.rounds, config.training.lr, config.training.steps) == (9, 0.5, 10)
    assert config.training.evaluate_every == 9 and config.training.weight_decay == 0
    assert config.model.precision == "bfloat16" and not config.model.graphs
    assert config.training.method == ("per-fedavg",) and config.data.dataset == "squad_v2"
    assert method_settings(config, "per-fedavg")["adaptation_lr"] == 0.25
