"""What a run is: the same from flags, a TOML file and Python; mistakes are said in one line with the right name."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from little_world import command_line, flags

from pf2lora.cli.options import EVERYDAY
from pf2lora.data.spec import DataSpec
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import api
from pf2lora.run.config import METHOD_NAMES, Config, from_dict, from_toml, option_types, to_dict, to_toml

OTHERS: dict[str, Any] = {  # a value other than the default for every setting
    "model": "some/model",
    "task": "generation",
    "method": ("homlora",),
    "rounds": 3,
    "steps": 4,
    "batch_size": 5,
    "max_length": 60,
    "rank": 7,
    "client_rank": 3,
    "lr": 0.5,
    "client_lr": 0.25,
    "weight_decay": 0.125,
    "hypergradient_mode": "exact",
    "batches": 4,
    "zeta_size": 2,
    "scaling": 2.0,
    "client_scaling": 3.0,
    "dropout": 0.1,
    "targets": ("query", "key"),
    "head": "personal",
    "participation": 0.5,
    "weighting": "size",
    "clients_per_pass": 2,
    "evaluate_every": 6,
    "seed": 11,
    "seeds": 2,
    "device": "cpu",
    "precision": "bfloat16",
    "title": "a title",
    "out": "some/folder",
    "trackers": ("mlflow", "wandb"),
}
OTHER_DATA: dict[str, Any] = {
    "clients": ("a.csv", "b.csv"),
    "test": ("c.csv",),
    "text": "body",
    "pair": "second",
    "label": "mood",
    "client_column": "site",
    "test_ratio": 0.4,
    "dataset": "sst2",
    "data_dir": "glue",
    "partition": "groups",
    "num_clients": 3,
    "heterogeneity": 0.5,
    "size_ratio": 2.0,
    "dirichlet_alpha": 0.75,
    "partition_column": "topic",
    "groups": ("a=1,2", "b=3"),
    "limit": 9,
}
FLAGS_OF_THE_ISSUE = (
    *("model", "method", "rounds", "steps", "batch_size", "rank", "client_rank", "lr", "client_lr"),
    *("seed", "device", "precision"),
)


def another(kind: Any, default: Any) -> Any:
    """Some other value of a setting that has no choices."""
    if typing.get_origin(kind) is tuple:
        return ("one", "two")
    if bool in (kind, *typing.get_args(kind)):
        return not default
    return "another" if str in (kind, *typing.get_args(kind)) else (default or 0) + 1


for table, defaults in ((OTHERS, Config()), (OTHER_DATA, DataSpec())):  # what only other tasks have
    for setting, kind in option_types(type(defaults)).items():
        table.setdefault(setting, another(kind, getattr(defaults, setting)))


def other_config() -> Config:
    return Config(**OTHERS, data=DataSpec(**OTHER_DATA), methods={"hetlora": {"penalty": 0.5, "r_max": 9}})


def as_flags(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words += [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]
            continue
        words += [flags({name: 0})[0], *value] if isinstance(value, tuple) else flags({name: value})
    return words


def test_every_setting_of_these_tests_differs_from_its_default() -> None:
    for values, default in ((OTHERS, Config()), (OTHER_DATA, DataSpec())):
        for name, value in values.items():
            assert value != getattr(default, name), name


def test_the_methods_of_the_config_are_those_there_are() -> None:
    assert tuple(METHODS) == METHOD_NAMES


def test_defaults_are_the_issues() -> None:
    config = Config()
    assert (config.rank, config.client_rank, config.client_lr) == (8, 2, 0.03)
    assert (config.scaling, config.client_scaling, config.hypergradient_mode) == (1.0, 1.0, "difference")
    assert config.method == ("pf2lora",) and set(FLAGS_OF_THE_ISSUE) <= set(EVERYDAY)


def test_toml_holds_everything(tmp_path: Path) -> None:
    for config in (Config(), other_config()):
        (tmp_path / "run.toml").write_text(to_toml(config))
        assert from_toml(tmp_path / "run.toml") == config
        assert from_dict(to_dict(config)) == config


def printed(monkeypatch: Any, capsys: Any, *args: object) -> Config:
    code, out, err = command_line(monkeypatch, capsys, *args, "--print-config")
    assert (code, err) == (0, "")
    return from_dict(tomllib.loads(out))


@pytest.mark.parametrize("command", ["train", "compare"])
def test_flags_toml_and_python_say_the_same(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wanted = dataclasses.replace(other_config(), methods={})
    by_flags = printed(monkeypatch, capsys, command, *as_flags(OTHERS | OTHER_DATA))
    (tmp_path / "run.toml").write_text(to_toml(wanted))
    by_file = printed(monkeypatch, capsys, command, tmp_path / "run.toml")
    seen: list[Config] = []
    monkeypatch.setattr(api, "run", lambda config, out, force: seen.append(config))
    api.federate(**OTHERS, **OTHER_DATA)
    assert by_flags == by_file == seen[0] == wanted


def test_print_config_is_the_whole_of_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, _ = command_line(monkeypatch, capsys, "train", "--print-config")
    values = tomllib.loads(out)
    unset = {"zeta_size", "clients_per_pass", "evaluate_every", "max_length", "separator"}  # TOML has no null
    assert code == 0 and set(option_types(Config)) - set(values) <= unset
    assert values["out"] == "runs/train" and values["rank"] == 8 and values["data"]["test_ratio"] == 0.2


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text('rank = 16\nlr = 1\nout = "there"\n[data]\ntext = "body"\nlabel = "mood"\n')
    config = printed(monkeypatch, capsys, "train", file, "--rank", 4, "--label", "kind", "--out", "here")
    assert (config.rank, config.lr, config.out) == (4, 1.0, "here")
    assert (config.data.text, config.data.label) == ("body", "kind")
    assert printed(monkeypatch, capsys, "train", file).out == "there"


def test_several_values_after_one_flag(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    config = printed(
        monkeypatch,
        capsys,
        *("compare", "--method", "homlora", "local"),
        *("--clients", "a.csv", "b.csv", "--targets", "query"),
    )
    assert config.method == ("homlora", "local") and config.data.clients == ("a.csv", "b.csv")
    assert printed(monkeypatch, capsys, "compare").method == METHOD_NAMES


MISTAKES: dict[str, tuple[str, str]] = {
    "unknown key": ("ranks = 8", r"unknown key 'ranks'; did you mean 'rank'\?"),
    "unknown data key": ("[data]\ntext_column = 'a'", r"\[data\]: unknown key 'text_column'"),
    "near data key": ("[data]\ntest_ration = 0.1", "did you mean 'test_ratio'"),
    "text for a number": ("rounds = 'ten'", "rounds must be of type int, not 'ten'"),
    "fraction for a count": ("rounds = 2.5", "rounds must be of type int, not 2.5"),
    "boolean for a count": ("rounds = true", "rounds must be of type int, not True"),
    "number for a list": ("targets = 3", "targets must be a list of strings, not 3"),
    "list of numbers": ("method = [1]", r"method must be a list of strings, not \[1\]"),
    "not a number": ("lr = nan", "lr must be a finite number"),
    "infinite": ("client_lr = inf", "client_lr must be a finite number"),
    "unknown method": ("method = ['pf2lore']", "unknown method 'pf2lore'; did you mean 'pf2lora'"),
    "no method": ("method = []", "no method is named"),
    "a method twice": ("method = ['local', 'local']", "the method 'local' is named twice"),
    "unknown method table": ("[methods.hetlor]\ngamma = 1", "'hetlor'; did you mean 'hetlora'"),
    "method without a table": ("[methods]\nhetlora = 3", r"\[methods.hetlora\] must be a table"),
    "data without a table": ("data = 3", r"\[data\] must be a table"),
    "unknown precision": ("precision = 'float31'", "unknown precision 'float31'; did you mean 'float32'"),
    "unknown task": ("task = 'classify'", "unknown task 'classify'"),
    "no rounds": ("rounds = 0", "rounds is 0; it must be above 0"),
    "no rate": ("lr = 0.0", "lr is 0.0; it must be above 0"),
    "negative rate": ("client_lr = -1.0", "client_lr is -1.0; it must be 0 or more"),
    "negative seed": ("seed = -1", "seed is -1; it must be 0 or more"),
    "not TOML": ("rank 8", "not valid TOML"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_file(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text, message = MISTAKES[mistake]
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        from_toml(file)
    code, out, err = command_line(monkeypatch, capsys, "train", file)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_client_rate_of_zero_and_whole_numbers_for_fractions_are_legal() -> None:
    config = from_dict({"client_lr": 0, "lr": 1, "dropout": 0})
    assert (config.client_lr, config.lr) == (0.0, 1.0) and isinstance(config.lr, float)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, err = command_line(monkeypatch, capsys, "train", tmp_path / "none.toml")
    assert (
        (code, out) == (2, "") and err.startswith("pf2lora: there is no config file") and err.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_ration": 0.1}, "unknown setting 'test_ration'; did you mean 'test_ratio'"),
        ({"client_rang": 1}, "did you mean 'client_rank'"),
        ({"rounds": "5"}, r"federate\(\): rounds must be of type int"),
        ({"lr": math.nan}, "lr must be a finite number"),
    ],
)
def test_mistakes_in_python(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        api.federate(model="m", clients="a.jsonl", **settings)


def test_python_takes_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(api, "run", lambda config, out, force: seen.append(config))
    api.federate(model=Path("m"), clients=Path("a.jsonl"))
    api.federate(model="m", clients=[Path("a.jsonl"), "b.jsonl"], out=Path("o"))
    assert [c.data.clients for c in seen] == [("a.jsonl",), ("a.jsonl", "b.jsonl")]
    assert (seen[0].model, seen[0].out, seen[1].out) == ("m", "", "o")
