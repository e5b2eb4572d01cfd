"""The paper's settings are in the presets, and what a preset says is checked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pf2lora.cli.reproduce import app, listed
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.reproduce import presets
from pf2lora.reproduce.preset import Preset, Run, data_folder, to_toml
from pf2lora.reproduce.presets import load_preset, parse, preset_names, title_of
from pf2lora.run.set_up import adapter_spec, method_settings, method_table

NAMES = preset_names()
NLG = ("webnlg-gpt2-medium", "webnlg-gpt2-xl", "e2e-gpt2-medium")


def run_of(preset: str, name: str) -> Run:
    return next(run for run in load_preset(preset).runs if run.name == name)


def rates(run: Run) -> dict[str, Any]:
    """Each method's rates as it is set up with."""
    found = {}
    for name in run.config.training.method:
        settings = method_settings(run.config, name)
        second = {"pf2lora": "client_lr", "pf2lora-joint": "client_lr", "per-fedavg": "adaptation_lr"}.get(
            name
        )
        found[name] = (settings["lr"], settings[second]) if second else settings["lr"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_parses_and_its_copy_is_the_same(name: str) -> None:
    preset = load_preset(name)
    assert preset.title == title_of(name)
    assert preset.needs and re.search(r"(Table|Figure)s? \d", preset.source)
    for run in preset.runs:
        for method in run.config.training.method:
            method_table(run.config, method)  # every setting of [methods.NAME] is one
            adapter_spec(run.config, method)
            if METHODS[method].two_level:  # α is the paper's, whatever the package's default becomes
                assert "client_lr" in run.config.methods[method]
        for numbers in run.paper.values():
            assert numbers.keys() <= set(run.config.training.method)
    assert parse(name, tomllib.loads(to_toml(preset)), "copy") == preset


@pytest.mark.parametrize("name", [*NAMES])
def test_what_all_of_the_papers_experiments_share(name: str) -> None:
    for run in load_preset(name).runs:
        training, adapter = run.config.training, run.config.adapter
        assert (training.steps, training.participation, adapter.scaling, adapter.client_scaling) == (
            10,
            1,
            1,
            1,
        )
        assert run.config.data.num_clients == (
            4 if (run.config.data.dataset or "").startswith("squad") else 8
        )
        generation = run.config.task.name == "generation"
        assert training.batch_size == (4 if generation else 16)
        if "hetlora" in training.method:
            assert method_settings(run.config, "hetlora")["gamma"] == 0.99


@pytest.mark.parametrize("preset", ["glue-roberta-base", "glue-roberta-large"])
def test_the_settings_of_glue(preset: str) -> None:
    runs = {run.name: run for run in load_preset(preset).runs}
    assert {name: run.config.training.rounds for name, run in runs.items()} == {
        **{"cola": 50, "mnli": 300, "sst2": 100},
        **{"qqp": 300, "qnli": 100},
    }
    assert {name: run.config.data.heterogeneity for name, run in runs.items()} == {
        **{"cola": 0.3, "mnli": 0.9, "sst2": 0.9},
        **{"qqp": 0.9, "qnli": 0.9},
    }
    assert rates(runs["cola"]) == {
        "centralized": 1e-3,
        "homlora": 1e-3,
        "per-fedavg": (2e-3, 1e-2),
        "hetlora": 5e-3,
        "pf2lora": (2e-3, 1e-4),
    }
    assert rates(runs["sst2"])["homlora"] == 2e-3
    assert rates(runs["qnli"])["per-fedavg"] == (2e-3, 1e-3)
    for name, run in runs.items():
        hetlora = method_table(run.config, "hetlora")
        assert hetlora["penalty"] == (1e-3 if name == "cola" else 5e-3)
        assert (hetlora["r_min"], hetlora["r_max"]) == (8, 12)
        assert (run.config.adapter.rank, run.config.adapter.client_rank) == (8, 2)
        assert run.config.model.name == preset.removeprefix("glue-")


def test_the_papers_numbers() -> None:
    assert run_of("glue-roberta-base", "cola").paper["matthews"]["pf2lora"] == pytest.approx(0.5419)
    assert run_of("glue-roberta-large", "mnli").paper["accuracy"]["hetlora"] == pytest.approx(0.7638)
    assert run_of("heterogeneity", "qnli-1").paper["accuracy"]["per-fedavg"] == pytest.approx(0.5048)
    assert run_of("heterogeneity-cola", "cola-0.4").paper["matthews"]["pf2lora"] == pytest.approx(0.5050)
    assert run_of("squad", "squad-v2").paper["exact_match"]["centralized"] == pytest.approx(0.4456)
    assert run_of("e2e-gpt2-medium", "e2e").paper["NIST"]["homlora"] == 7.0986
    assert run_of("more-parameters", "qqp").paper["accuracy"]["homlora"] == pytest.approx(0.8011)


def test_the_settings_of_squad_and_generation() -> None:
    squad = run_of("squad", "squad-v1").config
    assert (squad.training.rounds, squad.adapter.rank, squad.adapter.client_rank) == (200, 8, 4)
    assert (squad.data.heterogeneity, squad.data.test_ratio) == (0.5, 0.2)
    assert method_table(squad, "hetlora") == {
        "lr": 5e-3,
        "r_min": 6,
        "r_max": 14,
        "gamma": 0.99,
        "penalty": 5e-3,
    }
    assert rates(run_of("squad", "squad-v2"))["pf2lora"] == (1e-3, 1e-2)
    expected = {
        "webnlg-gpt2-medium": (2e-3, 1e-3),
        "webnlg-gpt2-xl": (1e-3, 1e-4),
        "e2e-gpt2-medium": (3e-3, 5e-4),
    }
    for name, pf2lora in expected.items():
        (run,) = load_preset(name).runs
        assert rates(run)["pf2lora"] == pf2lora
        assert (run.config.adapter.rank, run.config.adapter.client_rank) == (4, 2)
        assert run.config.training.rounds == (300 if name.startswith("e2e") else 200)
        hetlora = method_table(run.config, "hetlora")
        assert (hetlora["r_min"], hetlora["r_max"], hetlora["penalty"]) == (6, 12, 5e-4)
        assert run.config.task.beams == 10  # type: ignore[attr-defined]
        assert run.config.task.length_penalty == (0.9 if name.startswith("e2e") else 0.8)  # type: ignore[attr-defined]
    assert "centralized" not in load_preset("webnlg-gpt2-xl").runs[0].config.training.method


def test_the_settings_of_the_ablations() -> None:
    more = run_of("more-parameters", "cola").config
    assert [adapter_spec(more, name).rank for name in ("homlora", "per-fedavg", "hetlora", "pf2lora")] == [
        12,
        12,
        12,
        8,
    ]
    assert method_table(more, "hetlora")["r_min"] == 5
    levels = [run.config.data.heterogeneity for run in load_preset("heterogeneity").runs]
    assert levels == [0.6, 0.9, 1.0] * 2
    bilevel = run_of("bilevel", "cola")
    assert rates(bilevel)["pf2lora"] == rates(bilevel)["pf2lora-joint"] == (2e-3, 1e-4)
    alphas = [rates(run)["pf2lora"][1] for run in load_preset("sensitivity-alpha").runs if run.of == "CoLA"]
    assert alphas[:5] == [1e-4, 5e-4, 1e-3, 2e-3, 5e-3]
    assert [run.config.adapter.rank for run in load_preset("sensitivity-rank").runs][:5] == [4, 6, 8, 12, 16]


def test_the_papers_grids() -> None:
    grids = {name: load_preset(name).grid for name in NAMES}
    assert {name for name, grid in grids.items() if grid} >= {"glue-roberta-base", "squad", *NLG}
    glue = grids["glue-roberta-base"]
    assert glue is not None and glue.values == (1e-4, 5e-4, 1e-3, 2e-3, 5e-3)
    assert glue.rates_of("pf2lora") == ("lr", "client_lr") and glue.rates_of("homlora") == ("lr",)


@pytest.mark.parametrize("columns", ["80", "50"])
def test_the_list_is_plain_and_wrapped_between_words(columns: str) -> None:
    done = CliRunner().invoke(app, ["--list"], env={"COLUMNS": columns, "FORCE_COLOR": "1"})
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= int(columns)
    told = " ".join(done.stdout.split())
    assert all(re.search(rf"^{re.escape(name)}  ", done.stdout, re.MULTILINE) for name, *_ in listed())
    for _, what, place, needs in listed():
        assert what in told and place in told and f"needs {needs}" in told


# --- what is wrong is said -----------------------------------------------------------------------------------

GOOD = """
title = "A small one"
[training]
method = ["homlora"]
[[runs]]
name = "one"
paper.accuracy = { homlora = 50.0 }
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("title =", "titel ="), "unknown key 'titel'; did you mean 'title'"),
        (('name = "one"', 'name = "../one"'), "becomes a folder"),
        (
            ('name = "one"', 'name = "one"\nlike = "glue-roberta-bas/cola"'),
            "did you mean 'glue-roberta-base'",
        ),
        (('name = "one"', 'name = "one"\nlike = "squad/cola"'), "unknown run of squad 'cola'"),
        (("{ homlora", "{ homlara"), "unknown method 'homlara'; did you mean 'homlora'"),
        (("50.0", '"many"'), "paper.accuracy.homlora must be a number"),
        (("[training]", 'figure = "pie"\n[training]'), "unknown figure 'pie'"),
        (("[training]", 'figure = "lines"\n[training]'), "needs the varied value"),
        (("[training]", "[vary]\nsetting = 'training.lr'\nvalues = [1, 2]\n[training]"), "lists of 2"),
        (("[training]", "[grid]\nvalues = [0.0, 1.0]\n[training]"), "a rate must be above 0"),
        (('method = ["homlora"]', "rounds = 0"), "rounds is 0"),
        (("[[runs]]", "[runs]"), "at least one [[runs]]"),
    ],
)
def test_a_mistake_is_named(change: tuple[str, str], message: str) -> None:
    parse("mine", tomllib.loads(GOOD), "mine.toml")
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse("mine", tomllib.loads(GOOD.replace(*change)), "mine.toml")
    assert "\n" not in str(caught.value)


def test_runs_are_chosen_by_name() -> None:
    preset = load_preset("heterogeneity")
    assert [run.name for run in preset.only(["sst2-1"]).runs] == ["sst2-1"]
    assert [run.name for run in preset.only(["sst2"]).runs] == ["sst2-0.6", "sst2-0.9", "sst2-1"]
    with pytest.raises(UserError, match=r"did you mean 'sst2-1'"):
        preset.only(["sst2-1.0"])


def test_settings_over_a_preset_leave_the_rest(tmp_path: Path) -> None:
    (tmp_path / "glue_cola").mkdir()
    preset: Preset = load_preset("glue-roberta-base").with_settings(
        {"model": {"name": "other"}, "training": {"rounds": 3}, "data": {"data_dir": str(tmp_path)}}
    )
    cola, mnli = preset.runs[:2]
    assert (cola.config.model.name, cola.config.training.rounds, cola.config.training.steps) == (
        "other",
        3,
        10,
    )
    assert cola.config.methods == load_preset("glue-roberta-base").runs[0].config.methods
    assert cola.config.data.data_dir == str(tmp_path / "glue_cola")
    assert mnli.config.data.data_dir == str(tmp_path)


def test_the_folder_of_a_data_set_among_others(tmp_path: Path) -> None:
    for name in ("SQuAD", "squad_v2", "webnlg2017", "e2e", "glue_sst2", "squad_partial"):
        (tmp_path / name).mkdir()
    found = {n: data_folder(tmp_path, n).name for n in ("squad", "squad_v2", "webnlg", "e2e", "sst2", "cola")}
    assert found.pop("cola") == tmp_path.name
    assert found == {
        **{"squad": "SQuAD", "squad_v2": "squad_v2", "webnlg": "webnlg2017"},
        **{"e2e": "e2e", "sst2": "glue_sst2"},
    }
    file = tmp_path / "train.json"
    assert data_folder(file, "squad") == file


def test_what_every_preset_begins_with_is_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "EVERYWHERE", {"data": {"limit": 7}})
    assert all(run.config.data.limit == 7 for name in NAMES for run in load_preset(name).runs)
