"""Using a run: predict, evaluate, onboard, export give what the run itself measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import (
    LEARNING,
    World,
    command_line,
    make_world,
    opened,
    sentences,
    write_csv,
    write_jsonl,
)
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import pf2lora
from pf2lora.data.loading import read_rows
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import onboarding
from pf2lora.run.comparison import prepare
from pf2lora.run.evaluation import Models
from pf2lora.run.joining import Joining, scores_of
from pf2lora.run.result import load_result
from pf2lora.run.saved import read_config
from pf2lora.run.validation import judge
from pf2lora.tasks.classification.rows import TextRow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """With a run of every method, and a longer one that learned something."""
    world = make_world(tmp_path_factory.mktemp("world"))
    pf2lora.federate(**world.settings(method=list(METHODS), out=world.root / "all"))
    pf2lora.federate(**world.settings(**LEARNING, out=world.root / "learned"))
    return world


@pytest.fixture
def run(world: World) -> Path:
    return world.root / "learned"


def rows_tested(folder: Path, name: str) -> list[TextRow]:
    """The rows that the run tested a client on."""
    return next(c.test for c in prepare(read_config(folder)).clients if c.name == name)


def as_records(rows: list[TextRow]) -> list[dict[str, str]]:
    return [{"text": row.text, "label": row.label} for row in rows]


@pytest.mark.parametrize("method", list(METHODS))
def test_evaluate_gives_what_the_run_measured(
    method: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = world.root / "all"
    file = write_csv(tmp_path / "rows.csv", as_records(rows_tested(folder, "south")))
    served = load_result(folder).methods[method].runs[0].served
    args = ["evaluate", folder, file, "--client", "south", "--method", method, "--json"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    found = json.loads(out)
    assert code == 0 and found.pop("rows") == 16 and set(found.pop("labels")) == {"neg", "pos"}
    for metric, value in found.items():
        wanted = served[metric].per_client[1]
        assert value == (wanted if wanted is None else pytest.approx(wanted, abs=1e-6)), metric


@pytest.mark.parametrize("method", list(METHODS))
def test_plain_peft_gives_what_a_client_is_served(method: str, world: World) -> None:
    """What the run measured, whatever the method makes of x and y before a client uses them."""
    loaded = opened(world.root / "all", method)
    folder = loaded.where / ("common" if loaded.saved.shares_one_model else "clients/south")
    base = AutoModelForSequenceClassification.from_pretrained(
        world.model, config=AutoConfig.from_pretrained(folder)
    )
    plain = PeftModel.from_pretrained(base, str(folder)).eval()
    texts = [row.text for row in rows_tested(world.root / "all", "south")]
    tokens = AutoTokenizer.from_pretrained(world.model)(
        texts, return_tensors="pt", padding=True, truncation=True, max_length=16
    )
    with torch.no_grad():
        ours = loaded.model(*loaded.client("south"), **tokens).logits
        torch.testing.assert_close(plain(**tokens).logits, ours, atol=1e-5, rtol=0)


def test_predict_agrees_with_evaluate(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = rows_tested(run, "west")
    args = ["predict", run, "--client", "west", *(row.text for row in rows)]
    code, out, _ = command_line(monkeypatch, capsys, *args, "--json")
    found = json.loads(out)
    assert code == 0 and [f["text"] for f in found] == [row.text for row in rows]
    right = sum(f["predicted"] == row.label for f, row in zip(found, rows)) / len(rows)
    served = load_result(run).methods["pf2lora"].runs[0].served["accuracy"].per_client
    assert right == pytest.approx(served[2]) and all(0.5 <= f["probability"] <= 1 for f in found)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(row.text for row in rows) + "\n")
    code, out, _ = command_line(monkeypatch, capsys, "predict", run, "--client", "west", "--file", texts)
    assert [line.split("\t")[0] for line in out.splitlines()] == [f["predicted"] for f in found]


def test_a_client_and_the_common_model_differ(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """To west, good words are bad: its own adapter knows."""

    def label(*client: str) -> str:
        return command_line(monkeypatch, capsys, "predict", run, "the film was superb", *client)[1].split(
            "\t"
        )[0]

    assert (label("--client", "north"), label("--client", "west")) == ("pos", "neg")
    assert label() in ("pos", "neg")


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("client", ["west", None])
def test_export(
    merge: bool, client: str | None, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "model"
    whose = ["--client", client] if client else []
    args = ["export", run, *whose, "--out", out, *(["--merge"] if merge else [])]
    assert command_line(monkeypatch, capsys, *args)[0] == 0
    loaded = opened(run)
    name = loaded.config.model.name
    if merge:
        plain = AutoModelForSequenceClassification.from_pretrained(out)
        assert plain.config.id2label == {0: "neg", 1: "pos"}
    else:
        config = AutoConfig.from_pretrained(out)
        base = AutoModelForSequenceClassification.from_pretrained(name, config=config)
        plain = PeftModel.from_pretrained(base, str(out))
        assert config.id2label == {0: "neg", 1: "pos"}
    tokens = AutoTokenizer.from_pretrained(out if merge else name)(
        ["the film was superb"], return_tensors="pt"
    )
    with torch.no_grad():
        ours = loaded.model(*loaded.client(client), **tokens).logits
        torch.testing.assert_close(plain.eval()(**tokens).logits, ours, atol=1e-5, rtol=0)
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "exists and is not empty" in err


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A run that may be changed."""
    import shutil

    return Path(shutil.copytree(run, tmp_path / "run"))


def test_onboard_end_to_end(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A newcomer to whom words mean the opposite: its own adapter gets further than the common one alone."""
    file = write_jsonl(tmp_path / "east.jsonl", sentences(80, seed=9, flipped=True))
    common = {p: p.read_bytes() for p in (*copy.glob("common/*"), copy / "state" / "common.safetensors")}
    others = {p: p.read_bytes() for p in copy.glob("clients/*/*")}
    args = ["onboard", copy, file, "--client", "east"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and "east is part of the run" in out
    for row in ("the common adapter alone", "own adapter on the common one", "training alone"):
        assert row in out
    assert "east deploys: own adapter on the common one (it has no validation rows to choose by)" in out
    assert len(common) == 5 and all(path.read_bytes() == before for path, before in (common | others).items())
    scores = json.loads((copy / "clients" / "east" / "onboarding.json").read_text())["scores"]
    assert list(scores) == ["own", "common", "local"]
    own, alone = scores["own"], scores["common"]
    assert own["accuracy"] > alone["accuracy"] + 0.3 and own["loss"] < alone["loss"]
    told = json.loads(
        command_line(monkeypatch, capsys, "evaluate", copy, file, "--client", "east", "--json")[1]
    )
    assert told["accuracy"] > 0.8 and told["rows"] == 80
    base = AutoModelForSequenceClassification.from_pretrained(opened(copy).config.model.name, num_labels=2)
    PeftModel.from_pretrained(base, str(copy / "clients" / "east"))
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "has a client 'east' already" in err and err.count("\n") == 1


def test_onboard_says_what_three_ways_give(copy: Path, tmp_path: Path) -> None:
    """What it reports is what the saved adapters give, and the opened run can be used on."""
    loaded = opened(copy)
    file = write_jsonl(tmp_path / "east.jsonl", sentences(40, seed=9))
    first = onboarding.onboard(loaded, "east", file, rounds=2)
    again = onboarding.onboard(loaded, "far-east", file, rounds=2)
    assert first.scores.keys() == again.scores.keys()
    client = onboarding.read_client(loaded, "east", file)
    reopened = opened(copy)
    joining = Joining(reopened, client, rounds=2)
    for models, scores in (
        (reopened.client("east"), first.scores["own"]),
        (reopened.client("east"), first.deploy),
        (reopened.common(), first.scores["common"]),
    ):
        assert scores_of(joining.measure(Models(*models))) == pytest.approx(scores, abs=1e-6)
    x, _ = reopened.client("east")
    assert torch.equal(x, reopened.common()[0])


def test_a_newcomer_finds_its_own_size_where_the_runs_clients_do(world: World, tmp_path: Path) -> None:
    """With rows to choose by, its adapter is never worse on them than the common one alone."""
    settings = LEARNING | {"rounds": 6, "client_lr": "auto", "validation_ratio": 0.2}
    pf2lora.federate(**world.settings(**settings), out=tmp_path / "run")
    loaded = opened(tmp_path / "run")
    for name, flipped in (("east", True), ("far-east", False)):
        file = write_jsonl(tmp_path / f"{name}.jsonl", sentences(80, seed=9, flipped=flipped))
        found = onboarding.onboard(loaded, name, file, rounds=10)
        client = onboarding.read_client(loaded, name, file)
        assert (len(client.train), len(client.validation), len(client.test)) == (51, 13, 16)
        joining = Joining(loaded, client, rounds=1)
        x, y = opened(tmp_path / "run").client(name)
        losses = judge(joining.trial(joining.local(), *loaded.common()), [0], joining.workload.validation)
        assert losses(x, y).mean() <= losses(*loaded.common()).mean() + 1e-9
        assert found.scores["own"].keys() == {"accuracy", "matthews", "loss"}
    assert json.loads((tmp_path / "run" / "clients" / "east" / "onboarding.json").read_text())


def test_training_alone_is_a_plain_lora_from_scratch(world: World, copy: Path, tmp_path: Path) -> None:
    """The third way of `onboard` is the method `local` on the same rows."""
    file = write_jsonl(tmp_path / "east.jsonl", sentences(40, seed=9))
    loaded = opened(copy)
    found = onboarding.onboard(loaded, "east", file, rounds=3)
    client = onboarding.read_client(loaded, "east", file)
    train = write_jsonl(tmp_path / "train" / "east.jsonl", as_records(client.train))
    test = write_jsonl(tmp_path / "test" / "east.jsonl", as_records(client.test))
    settings = world.settings(**LEARNING, method="local") | {
        "clients": [str(train)],
        "test": [str(test)],
        "rounds": 3,
    }
    served = pf2lora.federate(**settings).methods["local"].runs[0].served
    assert found.scores["local"]["loss"] == pytest.approx(served["loss"].mean, rel=1e-4)


def test_who_cannot_be_onboarded(
    world: World, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    rows = sentences(20, seed=9)
    good = write_jsonl(tmp_path / "good.jsonl", rows)
    few = write_jsonl(tmp_path / "few.jsonl", rows[:3])
    strange = write_jsonl(tmp_path / "strange.jsonl", [*rows, {"text": "the film", "label": "so-so"}])
    for args, message in (
        ([run, good, "--client", "north"], "has a client 'north' already"),
        ([run, good, "--client", "../north"], "cannot name a client"),
        ([run, few, "--client", "new"], "has 3 rows; at least 4 are needed"),
        (
            [run, strange, "--client", "new"],
            "strange.jsonl, line 21: the label 'so-so' is unseen in training",
        ),
        ([run, tmp_path / "none.csv", "--client", "new"], "none.csv: no such file"),
        ([run, good, "--client", "new", "--rounds", "0"], "rounds is 0"),
        (
            [world.root / "all", good, "--client", "new", "--method", "local"],
            "there is no common adapter to join",
        ),
        ([run, good, "--client", "new", "--client-lr", "fast"], "--client-lr is 'fast'"),
        ([run, good, "--client", "new", "--test", tmp_path / "none.csv"], "none.csv: no such file"),
    ):
        code, out, err = command_line(monkeypatch, capsys, "onboard", *args)
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err, err
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("command", ["predict", "evaluate", "export"])
def test_whose_model_is_not_there(
    command: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", sentences(8, seed=9))
    inputs: dict[str, list[object]] = {
        "predict": ["a film"],
        "evaluate": [file],
        "export": ["--out", tmp_path / "model"],
    }
    for where, message in (
        (["all", "--client", "nobody", "--method", "centralized"], "has no client 'nobody'"),
        (["all", "--method", "local"], "method 'local' has no common adapter"),
        (["learned", "--method", "homlora"], "has no method 'homlora'"),
        (["nowhere"], "there is no run folder"),
        (["model"], "is no run folder"),
    ):
        args = [command, world.root / where[0], *inputs[command], *where[1:]]
        code, out, err = command_line(monkeypatch, capsys, *args)
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err, err
    assert not (tmp_path / "model").exists()


def test_nothing_to_predict(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for args, message in (
        ([], "nothing to predict"),
        (["  "], "an empty text"),
        (["--file", "x"], "no such file"),
    ):
        code, _, err = command_line(monkeypatch, capsys, "predict", run, *args)
        assert (code, err.count("\n")) == (2, 1) and message in err


def test_a_run_on_pairs_takes_pairs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = [{"premise": r["text"], "hypothesis": "the plot", "label": r["label"]} for r in sentences(20, 3)]
    data = write_csv(tmp_path / "one.csv", rows)
    run = tmp_path / "run"
    pf2lora.federate(**world.settings(out=run, rounds=1) | {"clients": [str(data)]})
    code, out, _ = command_line(
        monkeypatch, capsys, "predict", run, "--json", "a film\ta plot", "a film\tthe end"
    )
    one, two = (row["probability"] for row in json.loads(out))
    assert code == 0 and one != two  # the second text counts
    code, _, err = command_line(monkeypatch, capsys, "predict", run, "a film")
    assert code == 2 and "give both with a tab between them, not 'a film'" in err


def test_a_frozen_new_head_is_the_same_when_the_run_is_opened_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Three labels where the checkpoint has two: the head is new, nobody trains it, and it is not in x."""
    rows = [dict(row) for row in sentences(60, seed=4)]
    for i in range(0, 60, 3):
        rows[i]["label"] = "mixed"
    data = write_jsonl(tmp_path / "one.jsonl", rows)
    run = tmp_path / "run"
    pf2lora.federate(**world.settings(head="frozen", out=run) | {"clients": [str(data)]})
    tested = rows_tested(run, "one")
    file = write_jsonl(tmp_path / "tested.jsonl", as_records(tested))
    torch.manual_seed(77)
    told = json.loads(
        command_line(monkeypatch, capsys, "evaluate", run, file, "--client", "one", "--json")[1]
    )
    served = load_result(run).methods["pf2lora"].runs[0].served
    assert told["loss"] == pytest.approx(served["loss"].mean, abs=1e-6)


def test_an_unknown_label_in_evaluate_names_the_line(run: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "rows.csv", [*sentences(5, 1), {"text": "a", "label": "other"}])
    with pytest.raises(UserError, match=r"rows.csv, line 7: the label 'other' is unseen in training"):
        read_rows(read_config(run).task, file, ["neg", "pos"])
