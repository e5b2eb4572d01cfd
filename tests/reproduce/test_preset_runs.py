"""Each preset, tiny, from the command to the table, the figure and the page; and one that was interrupted goes on."""

from __future__ import annotations

import gc
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_world import write_world
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.cli.reproduce import app
from pf2lora.engines.batches import Batch
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.reproduce import running
from pf2lora.reproduce.grid import between
from pf2lora.reproduce.presets import load_preset, preset_names
from pf2lora.reproduce.running import same_prompt
from pf2lora.reproduce.shapes import count, method_on, shape_of
from pf2lora.run import comparison, tries
from pf2lora.run.config import Config, from_dict
from pf2lora.run.costs import flops_of_step
from pf2lora.run.result import Result, load_result
from pf2lora.run.set_up import adapter_spec

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = {"beams = 10": "beams = 1", "max_new_tokens = 64": "max_new_tokens = 2"}
TRAINED = [name for name in preset_names() if not load_preset(name).counted]
TABLES = Path(__file__).parents[2] / "benchmarks" / "results" / "tables"
COUNTED = [name for name in preset_names() if load_preset(name).counted]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("paper"))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What most of a tiny run would wait for: Java's start (METEOR is tested elsewhere), and the collection of the
    test process's many objects after each method."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gc, "collect", lambda: 0)


def reproduce(*args: object) -> str:
    done = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "150"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def tiny(world: Path, name: str) -> list[object]:
    """Flags that make a preset small."""
    task = load_preset(name).runs[0].config.task.name
    model = {"classification": "classifier", "question-answering": "reader", "generation": "writer"}[task]
    flags = ["--model", world / model, "--data-dir", world / "data", "--rounds", 2, "--steps", 1]
    return [*flags, "--batch-size", 2, "--device", "cpu", "--evaluate-every", 2]


def run_tiny(world: Path, name: str, folder: Path, runs: int) -> str:
    """The preset as its user would edit and run it: copied out with its flags, with small texts to generate."""
    only = [flag for run in load_preset(name).runs[:runs] for flag in ("--only", run.name)]
    copy = reproduce(name, *tiny(world, name), "--print-config")
    for before, after in QUICK.items():
        copy = copy.replace(before, after)
    file = folder / f"{name}.toml"
    file.write_text(copy, encoding="utf8")
    return reproduce(file, *only, "--out", folder)


def check_output(name: str, folder: Path, shown: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf8"))
    preset, page = load_preset(name), (folder / f"{name}.md").read_text(encoding="utf8")
    assert preset.title in shown and preset.title in page
    runs = {run.name: run for run in preset.runs}
    assert content["rows"]
    for row in content["rows"]:
        assert row["paper"] == pytest.approx(
            runs[row["run"]].paper.get(row["quantity"], {}).get(row["method"])
        )
        assert METHODS[row["method"]].label in shown
    for kind in ("svg", "png"):
        assert (folder / f"{name}.{kind}").is_file() == (preset.figure != "none")
    return content


@pytest.mark.parametrize("name", TRAINED)
def test_each_preset_runs_end_to_end(name: str, world: Path, tmp_path: Path) -> None:
    shown = run_tiny(world, name, tmp_path, runs=2 if load_preset(name).figure == "lines" else 1)
    content = check_output(name, tmp_path, shown)
    absent = {"METEOR", "ROUGE_L", "CIDEr", "NIST"}  # what needs Java
    for row in content["rows"]:
        assert row["served"] or row["quantity"] in absent or "perplexity" in row["quantity"], row
    for run in content["runs"]:
        result = load_result(tmp_path / run["name"])
        assert result.config == run["config"]
        for (
            method,
            of_method,
        ) in result.methods.items():  # every metric at every point, also what no table shows
            for point, scores in run["scores"][method].items():
                for metric, found in scores.items():
                    at = [seed.at(point) for seed in of_method.runs]
                    assert found == [None if of_seed is None else of_seed[metric].mean for of_seed in at]
            assert set(run["scores"][method]["served"]) == set(of_method.runs[0].served)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_run_of_each_preset(name: str, world: Path, tmp_path: Path) -> None:
    shown = run_tiny(world, name, tmp_path, runs=1000)
    content = check_output(name, tmp_path, shown)
    assert [run["name"] for run in content["runs"]] == [run.name for run in load_preset(name).runs]


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted_is_the_papers(name: str, tmp_path: Path) -> None:
    content = check_output(name, tmp_path, reproduce(name, "--out", tmp_path))
    found, stored = (
        {(r["run"], r["method"], r["quantity"]): r["served"]["mean"] for r in of["rows"]}
        for of in (content, json.loads((TABLES / f"{name}.json").read_text()))
    )
    assert found == pytest.approx(stored, rel=0.02) and content["runs"][0]["versions"]["torch"]
    if name == "costs":  # at RoBERTa's longest inputs, the paper's operations
        assert found["exact", "homlora", "tflops"] == pytest.approx(258.40, rel=2e-3)
        assert found["exact", "pf2lora", "tflops"] > 3 * found["exact", "homlora", "tflops"]
        assert found["exact", "hetlora", "sent_parameters"] == pytest.approx(0.35e6, rel=0.01)
        return
    differ = {("deberta-v3-base", "hetlora"), ("more-parameters", "hetlora")}  # as the preset's notes say
    for row in content["rows"]:
        if row["paper"] is not None and (row["run"], row["method"]) not in differ:
            assert row["served"]["mean"] == pytest.approx(row["paper"], rel=0.02), row


def test_another_models_shape_is_counted(world: Path, tmp_path: Path) -> None:
    flags = ("--model", world / "classifier", "--only", "roberta-base", "--out", tmp_path)
    reproduce("parameters", *flags)
    rows = json.loads((tmp_path / "parameters.json").read_text())["rows"]
    common = 2 * 2 * 16 * 8  # query and value of one layer, A and B, width 16, rank 8
    assert {r["served"]["mean"] for r in rows if r["method"] == "homlora"} == {common}
    page = (tmp_path / "parameters.md").read_text()
    assert page.startswith("# Trainable parameters, with ")
    assert "/classifier in place of roberta-base" in page.splitlines()[0]


def test_the_examples_are_of_the_papers_prompts(world: Path, tmp_path: Path) -> None:
    shown = run_tiny(world, "examples-e2e", tmp_path, runs=1)
    result = load_result(tmp_path / "e2e")
    wanted = load_preset("examples-e2e").examples[0]
    (ours,) = [example for example in result.examples if same_prompt(example.prompt, wanted.prompt)]
    assert ours.outputs.keys() == {"hetlora", "pf2lora"}
    assert "An English pub." in shown and "the paper: " + wanted.outputs["pf2lora"] in shown


# --- what was interrupted -----------------------------------------------------------------------------------


def test_an_interrupted_reproduction_goes_on(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("bilevel", *tiny(world, "bilevel"), "--only", "cola", "--only", "mnli", "--out", tmp_path)
    trained: list[str] = []
    compare, killed = running.compare, [1]

    def watched(config: Config, *rest: Any) -> Result:
        if len(trained) in killed:
            killed.clear()
            raise KeyboardInterrupt
        trained.extend(config.training.method)
        return compare(config, *rest)

    monkeypatch.setattr(running, "compare", watched)
    done = CliRunner().invoke(app, [*map(str, args), "--seeds", "2"])
    assert done.exit_code != 0 and trained == ["pf2lora"]
    reproduce(*args, "--seeds", 2)
    assert trained[1:] == ["pf2lora-joint", "pf2lora", "pf2lora-joint"]
    first = json.loads((tmp_path / "bilevel.json").read_text())
    assert first["rows"][0]["served"]["count"] == 2
    assert [run.seed for run in load_result(tmp_path / "cola").methods["pf2lora"].runs] == [0, 1]

    again = reproduce(*args, "--seeds", 2)
    assert len(trained) == 4 and json.loads((tmp_path / "bilevel.json").read_text()) == first
    assert "±" in again
    with pytest.raises(
        UserError, match=r"result\.json is of other settings \(training\.seeds was 2 and is 1\)"
    ):
        reproduce(*args)
    reproduce(*args, "--force")
    assert len(trained) == 8


def test_it_is_as_one_comparison_would_be(world: Path, tmp_path: Path) -> None:
    """Methods by themselves give what `pf2lora compare` gives for all of them."""
    flags = [*tiny(world, "bilevel"), "--only", "cola", "--seeds", 2]
    config = from_dict(tomllib.loads(reproduce("bilevel", *flags, "--print-config")))
    expected = comparison.compare(config)
    reproduce("bilevel", *flags, "--out", tmp_path)
    found = load_result(tmp_path / "cola")
    for name, method in expected.methods.items():
        ours = found.methods[name].runs
        assert [run.served for run in ours] == [run.served for run in method.runs]
        assert [run.rounds[-1].train_loss for run in ours] == [
            run.rounds[-1].train_loss for run in method.runs
        ]


def test_one_that_diverges_does_not_cost_the_others(world: Path, tmp_path: Path) -> None:
    flags = [*tiny(world, "bilevel"), "--only", "cola", "--only", "mnli", "--print-config"]
    copy = reproduce("bilevel", *flags).replace("client_lr = 0.0001", "client_lr = 1e30", 1)
    (tmp_path / "mine.toml").write_text(copy, encoding="utf8")
    shown = reproduce(tmp_path / "mine.toml", "--rounds", 4, "--out", tmp_path)
    assert "diverged" in shown
    rows = json.loads((tmp_path / "mine.json").read_text())["rows"]
    assert [bool(row["served"]) for row in rows] == [False, True, True, True]


# --- the grid -----------------------------------------------------------------------------------------------


def test_the_grid_gives_every_method_as_many_tries(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "glue-roberta-base"
    (tmp_path / f"{name}.toml").write_text(
        re.sub(
            r"values = \[.*?\]",
            "values = [0.001, 0.01]",
            reproduce(name, *tiny(world, name), "--print-config"),
            flags=re.DOTALL,
        ),
        encoding="utf8",
    )
    args = (tmp_path / f"{name}.toml", "--only", "cola", "--method", "homlora", "pf2lora", "--grid")
    shown = reproduce(*args, "--out", tmp_path)
    (run,) = json.loads((tmp_path / f"{name}.json").read_text())["runs"]
    assert [(s["method"], len(s["tries"])) for s in run["grid"]] == [("homlora", 4), ("pf2lora", 4)]
    for search in run["grid"]:
        best = min(search["tries"], key=lambda t: t["score"])
        assert search["chosen"] == best["rates"]
        assert run["config"]["methods"][search["method"]].items() >= best["rates"].items()
    assert "best of 4 tries" in shown

    for room, work in ((tries, "run_group"), (running, "compare")):
        monkeypatch.setattr(room, work, lambda *a: pytest.fail("it was tried already"))
    reproduce(*args, "--out", tmp_path)
    with pytest.raises(UserError, match="bilevel has no grid"):
        reproduce("bilevel", *tiny(world, "bilevel"), "--grid", "--out", tmp_path / "other")


def test_more_rates_lie_between_the_neighbours_of_the_best() -> None:
    found = between((1e-4, 1e-3, 1e-2), 1e-3)
    assert found == pytest.approx([10**-3.5, 1e-3, 10**-2.5], rel=1e-2)
    assert all(1e-3 < rate < 1e-2 for rate in between((1e-4, 1e-3, 1e-2), 1e-2))


# --- looking ------------------------------------------------------------------------------------------------


def test_the_list_has_everything_and_what_it_needs() -> None:
    shown = " ".join(reproduce("--list").split())
    for name in (*preset_names(), "synthetic", "theorem"):
        assert name in shown
    assert "microsoft/deberta-v3-base" in shown and "Figure 2" in shown


def test_one_run_alone_is_printed_as_a_config(world: Path) -> None:
    content = tomllib.loads(reproduce("squad", "--only", "squad-v1", "--model", "mine", "--print-config"))
    config = from_dict(content)
    assert (config.model.name, config.training.rounds, config.data.dataset) == ("mine", 200, "squad")
    assert config.methods["pf2lora"]["client_lr"] == 0.01


@pytest.mark.parametrize("wrong", ["glue-roberta-bas", "syntetic"])
def test_an_unknown_name_suggests_the_nearest(wrong: str) -> None:
    with pytest.raises(UserError, match=f"unknown reproduction '{wrong}'; did you mean"):
        reproduce(wrong)


def test_a_model_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be fetched") as caught:
        reproduce("e2e-gpt2-medium", "--data-dir", write_world(tmp_path) / "data", "--out", tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["exact", "difference"])
def test_a_model_without_weights_counts_as_one_with_them(mode: str) -> None:
    run = load_preset("costs").runs[0]
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    run = replace(run, shape=run.shape | small | {"vocab_size": 50}, length=12)
    training = replace(run.config.training, hypergradient_mode=mode, batch_size=2)
    config = replace(run.config, training=training, adapter=replace(run.config.adapter, head="frozen"))
    run = replace(run, config=config)
    counted = count(run)["tflops"]
    for name in config.training.method:
        clients = 1 if METHODS[name].pooled else 8
        torch.manual_seed(0)
        base = AutoModelForSequenceClassification.from_config(shape_of(run))
        model = TwoLevelModel(base, adapter_spec(config, name))
        method = method_on(config, name, model, 1)
        size = method.batch_size(2, 8)
        batch = Batch(1, {"input_ids": torch.full((size, 12), 7)}, full=True)

        def F(x: Tensor, y: Tensor, batch: Batch, model: TwoLevelModel = model) -> Tensor:
            return model(x, y, attention_mask=None, **batch.tensors).logits.square().mean().view(1)

        state = method.init(*model.initial(0, ["one"]))
        step = flops_of_step(method, F, state, [batch] * method.draws)
        assert counted[name] * 1e12 == pytest.approx(step * 10 * clients)
