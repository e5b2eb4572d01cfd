"""`lr = "auto"`: the rule, where its number is to be seen, and that a number which is given wins."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, command_line, make_world, opened, sentences, write_jsonl
from pinned_runs import OF_TASK, write_task
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import pf2lora
from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core import rates
from pf2lora.core.layout import NO_LAYOUT, Entry, Layout
from pf2lora.core.rates import rate_in_numbers
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.methods.local import Local
from pf2lora.run.comparison import Watcher, compare, prepare
from pf2lora.run.config import Config, from_settings, to_dict
from pf2lora.run.joining import Joining
from pf2lora.run.onboarding import onboard, read_client
from pf2lora.run.set_up import first_rate, merging_method, set_up
from pf2lora.tasks import TASKS

SHORT: dict[str, Any] = {"method": ["pf2lora"], "validation_ratio": 0.2, "client_lr": "auto"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("auto rate"))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> float:
    """The world's model, 32 wide, is four times as wide as what 3e-3 is for; its rate."""
    monkeypatch.setattr(rates, "WIDTH", 8)
    return 3e-3 / 4


def config_of(world: World, **changes: Any) -> Config:
    return from_settings(world.settings(**SHORT | changes), "test")


def layout_of(*widths: int) -> Layout:
    shapes = [("A", (4, width)) for width in widths] + [("B", (5, 4)) for _ in widths]
    entries = [Entry(f"m{i % len(widths)}", kind, shape) for i, (kind, shape) in enumerate(shapes)]  # type: ignore[arg-type]
    return Layout.of([*entries, Entry("classifier", "head", (2, 6000), "weight")])


# --- the rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((384,), 3e-3),
        ((768, 768), 3e-3),
        ((1024,), 2.25e-3),
        ((4096, 4096), 5.625e-4),
        ((4096, 11008, 4096), 5.625e-4),  # all-linear: the layer down from the middle is wider
        ((11008, 128), 3e-3),
    ],
)
def test_the_rate_goes_by_the_smallest_input_of_the_adapted_layers(
    widths: tuple[int, ...], expected: float
) -> None:
    assert rate_in_numbers("auto", layout_of(*widths)) == pytest.approx(expected, rel=1e-12)
    assert rate_in_numbers(0.02, layout_of(*widths)) == 0.02
    assert rate_in_numbers("auto", NO_LAYOUT) == rates.RATE


def test_queries_and_all_linear_layers_of_a_model_give_the_hidden_size(narrow: float) -> None:
    """Whatever the ranks are, and of whatever the head is an input."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    base = LlamaForCausalLM(LlamaConfig(vocab_size=11, num_key_value_heads=1, **sizes))
    for targets in ((), ("all-linear",)):
        model = TwoLevelModel(base, AdapterSpec(rank=6, client_rank=2, targets=targets))
        model.remove()
        assert rate_in_numbers("auto", model.common_layout) == narrow


# --- everything that is set up has the number ------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS.own)
def test_every_method_has_it_at_clients_and_at_the_server(name: str, world: World, narrow: float) -> None:
    workload = prepare(config_of(world, method=[name]))
    trial = set_up(workload, name, 0)
    trial.model.remove()
    server = merging_method(workload.config, name, trial.method.layout, 3)
    rate = narrow / math.sqrt(8) if name == "local" else narrow  # which was found for the mean of eight
    assert trial.method.lr == server.lr == first_rate(workload, name) == pytest.approx(rate, rel=1e-12)
    if name in ("fedadam", "fedyogi"):
        assert (server.server_lr, server.tau) == (3 * narrow, narrow)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("task", "expected"), [("question-answering", 3e-3), ("generation", 9e-3)])
def test_where_text_is_learned_it_is_three_times_that(
    task: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At clients, at the server, and for who comes later; less on a wide model as ever (these are 16 wide)."""
    model, files = write_task(task, tmp_path)
    about = OF_TASK[task] | {"task": task, "rounds": 1, "steps": 1, "method": ["pf2lora"]}
    settings = about | {"model": str(model), "clients": [str(file) for file in files]}
    workload = prepare(from_settings(settings, "test"))
    for width, rate in ((768, expected), (4, expected / 4)):
        monkeypatch.setattr(rates, "WIDTH", width)
        trial = set_up(workload, "pf2lora", 0)
        trial.model.remove()
        server = merging_method(workload.config, "pf2lora", trial.method.layout, 3)
        assert trial.method.lr == server.lr == first_rate(workload, "pf2lora") == pytest.approx(rate)
        assert TASKS[task].rate == expected
    pf2lora.federate(**settings, out=tmp_path / "run")
    run = opened(tmp_path / "run")
    assert Joining(run, read_client(run, "east", files[0]), 1).local().lr == pytest.approx(expected / 4)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"lr": 0.02}, 0.02),
        ({"methods": {"pf2lora": {"lr": 0.03}}}, 0.03),
        ({"lr": 0.02, "methods": {"pf2lora": {"lr": 0.03}}}, 0.03),
        ({"lr": 0.02, "methods": {"pf2lora": {"lr": "auto"}}}, 3e-3),
        ({"methods": {"homlora": {"lr": 0.03}}}, 3e-3),
        ({"lr": "auto"}, 3e-3),
    ],
)
def test_a_number_that_is_given_wins(asked: dict[str, Any], expected: float, world: World) -> None:
    result = pf2lora.federate(**world.settings(**SHORT | asked, rounds=1, steps=1))
    assert result.methods["pf2lora"].runs[0].settings["lr"] == expected


def test_what_is_no_rate_is_refused(world: World) -> None:
    for wrong in ({"lr": "fast"}, {"methods": {"pf2lora": {"lr": "fast"}}}):
        with pytest.raises(UserError, match="lr must be a number or auto, not 'fast'"):
            prepare(config_of(world, **wrong))


def test_side_by_side_each_has_its_own_and_a_schedule_multiplies_it(world: World) -> None:
    """Given as a number or left open, with two seeds in the same passes."""
    found = [
        pf2lora.federate(
            **world.settings(**SHORT | {"seeds": 2, "schedule": "cosine", "warmup": 0.3} | given)
        )
        for given in ({}, {"lr": 3e-3})
    ]
    losses = [[r.train_loss for run in f.methods["pf2lora"].runs for r in run.rounds] for f in found]
    assert losses[0] == losses[1]


# --- what a user sees -------------------------------------------------------------------------------------------


def test_a_run_says_its_number_wherever_it_says_how_it_was_made(
    world: World, narrow: float, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    files = [*world.base, "--client-lr", "auto", "--validation-ratio", 0.2]
    code, printed, error = command_line(monkeypatch, capsys, "train", *files, "--out", tmp_path / "run")
    assert code == 0, error
    assert printed.count("--lr auto is 0.00075 on this model\n") == 1
    result = pf2lora.load_result(tmp_path / "run")
    assert result.config["training"]["lr"] == "auto"
    assert 'lr = "auto"' in (tmp_path / "run/config.toml").read_text()
    own = result.methods["pf2lora"].runs[0].settings
    assert (own["lr"], own["client_lr"], own["weight_decay"]) == (narrow, "auto", 0.01)
    page = (tmp_path / "run/report.html").read_text(encoding="utf8")
    assert "&#34;auto&#34; (0.00075)" in page and page.count("(0.00075)") == 1
    for card in (tmp_path / "run/clients/north/README.md", tmp_path / "run/common/README.md"):
        assert ", lr 0.00075, seed 0" in card.read_text()
    code, printed, error = command_line(monkeypatch, capsys, "train", *files, "--dry-run")
    assert code == 0 and "lr 0.00075, 1 seed" in printed, error


def test_one_line_for_all_methods_and_none_where_a_number_is_given(world: World) -> None:
    def told(**changes: Any) -> list[str]:
        config, notes = (
            config_of(world, method=["homlora", "local", "pf2lora"], rounds=1, steps=1, **changes),
            list[str](),
        )
        compare(config, Watcher(on_note=notes.append), prepare(config))
        return [note for note in notes if "--lr" in note]

    assert told() == ["--lr auto is 0.003 on this model, 0.00106 for Local"]
    others = {"local": {"lr": 0.01}, "homlora": {"lr": 0.01}}
    assert told(methods=others) == ["--lr auto is 0.003 on this model"]
    assert told(lr=1e-3) == []


def test_without_validation_rows_the_report_has_both_rates(world: World, tmp_path: Path) -> None:
    pf2lora.federate(
        **world.settings(client_lr="auto", methods={"homlora": {"lr": 0.5}}, out=tmp_path / "run")
    )
    page = (tmp_path / "run/report.html").read_text(encoding="utf8")
    assert "&#34;auto&#34; (0.003)" in page and "&#34;auto&#34; (0.03)" in page


# --- later ------------------------------------------------------------------------------------------------------


def test_newcomers_learn_at_the_runs_rate(world: World, narrow: float, tmp_path: Path) -> None:
    """Of every kind: with an own adapter, with one that is adapted, and alone."""
    file = write_jsonl(tmp_path / "east.jsonl", sentences(60, 9))
    for name in ("pf2lora", "per-fedavg", "hetlora"):
        pf2lora.federate(**world.settings(**SHORT | {"method": [name]}, out=tmp_path / name))
        run = opened(tmp_path / name)
        joining = Joining(run, read_client(run, "east", file), 1)
        assert joining.local().lr == joining.newcomer().lr == narrow
        assert isinstance(joining.local(), Local)
        assert joining.serving(*run.common())[1].method.lr == narrow
        assert onboard(run, "east", file, 1).client.name == "east"


def test_a_folder_of_before_has_its_number(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A run of the old default is read, joined and reported as what it was; its result says no settings."""
    pf2lora.federate(**world.settings(**SHORT | {"lr": 1e-3}, out=tmp_path / "run"))
    text = (tmp_path / "run/result.json").read_text()
    start = text.index('"settings": {')
    older = text[:start].rstrip().rstrip(",") + text[text.index("}", start) + 1 :]
    (tmp_path / "run/result.json").write_text(older)
    result = pf2lora.load_result(tmp_path / "run")
    assert result.methods["pf2lora"].runs[0].settings == {}
    run = opened(tmp_path / "run")
    assert run.config.training.lr == 1e-3
    file = write_jsonl(tmp_path / "east.jsonl", sentences(60, 9))
    assert Joining(run, read_client(run, "east", file), 1).local().lr == 1e-3
    onboard(run, "east", file, 1)
    code, _, error = command_line(monkeypatch, capsys, "report", tmp_path / "run")
    assert code == 0, error


def test_the_number_and_the_word_train_the_same(world: World, tmp_path: Path) -> None:
    for name, given in (("word", {}), ("number", {"lr": 3e-3})):
        pf2lora.federate(**world.settings(**SHORT | given, out=tmp_path / name))
    for file in sorted((tmp_path / "word/state").rglob("*.safetensors")):
        word, number = load_file(file), load_file(tmp_path / "number" / file.relative_to(tmp_path / "word"))
        assert word.keys() == number.keys() and all(torch.equal(word[n], number[n]) for n in word)


def test_another_number_is_another_run(world: World) -> None:
    """A config says what was asked for, so that `auto` is not 3e-3, even where it comes to it."""
    config = config_of(world)
    other = replace(config, training=replace(config.training, lr=3e-3))
    assert to_dict(config) != to_dict(other)
