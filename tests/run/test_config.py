"""What a run is: the same from flags, a TOML file and Python; mistakes are said in one line with the right name."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from little_world import command_line, flags

from pf2lora.cli.options import EVERYDAY, choices
from pf2lora.errors import UserError
from pf2lora.methods import METHODS, SETS
from pf2lora.run import api
from pf2lora.run.config import (
    NAMED,
    TABLES,
    Config,
    from_dict,
    from_settings,
    from_toml,
    setting_names,
    to_dict,
    to_toml,
)
from pf2lora.settings import settings_of, types_of
from pf2lora.tasks import TASKS

OTHERS: dict[str, Any] = {  # a value other than the default for every setting
    "model": "some/model",
    "task": "question-answering",
    "method": ("homlora",),
    "rounds": 3,
    "steps": 4,
    "batch_size": 5,
    "micro_batch": 2,
    "max_length": 60,
    "rank": 7,
    "client_rank": 3,
    "lr": 0.5,
    "client_lr": 0.25,
    "schedule": "cosine",
    "warmup": 0.25,
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
    "keep": "last",
    "patience": 3,
    "personal_steps": 7,
    "dp_delta": 1e-4,
    "seed": 11,
    "seeds": 2,
    "device": "cpu",
    "precision": "bfloat16",
    "checkpointing": "on",
    "quantization": "nf4",
    "title": "a title",
    "out": "some/folder",
    "trackers": ("mlflow", "wandb"),
    "clients": ("a.csv", "b.csv"),
    "test": ("c.csv",),
    "context": "body",
    "question": "second",
    "answers": "mood",
    "client_column": "site",
    "test_ratio": 0.4,
    "validation": ("d.csv",),
    "validation_ratio": 0.3,
    "dataset": "squad",
    "data_dir": "glue",
    "partition": "groups",
    "num_clients": 3,
    "heterogeneity": 0.5,
    "size_ratio": 2.0,
    "dirichlet_alpha": 0.75,
    "partition_column": "topic",
    "groups": ("a=1,2", "b=3"),
    "limit": 9,
    "test_limit": 8,
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


TASK = TASKS[OTHERS["task"]]
for table in (*TABLES.values(), TASK):  # the rest
    for setting, kind in types_of(table).items():
        if setting != "name" and setting not in OTHERS:
            OTHERS[setting] = another(kind, settings_of(table)[setting].default)


def other_config() -> Config:
    return from_settings(OTHERS | {"methods": {"hetlora": {"penalty": 0.5, "r_max": 9}}})


def as_flags(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words += [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]
            continue
        words += [flags({name: 0})[0], *value] if isinstance(value, tuple) else flags({name: value})
    return words


def test_every_setting_of_these_tests_differs_from_its_default() -> None:
    default, other = to_dict(Config(task=TASK())), to_dict(other_config())
    for table, kind in {**TABLES, "task": TASK}.items():
        for name in settings_of(kind):
            assert default[table].get(name) != other[table][name], name


def test_no_two_tables_have_a_setting_of_the_same_name() -> None:
    """By name alone, as flags have it, a setting must be one; several tasks may share one."""
    for task in TASKS:
        names = setting_names(TASKS[task])
        assert len(names) == len(set(names)), task


def test_a_methods_name_is_its_key() -> None:
    assert [METHODS[name].name for name in METHODS] == list(METHODS)
    assert [TASKS[name].name for name in TASKS] == list(TASKS)


def test_defaults_are_the_issues() -> None:
    config = Config()
    assert (config.adapter.rank, config.adapter.client_rank, config.training.client_lr) == (8, 2, "auto")
    assert (config.adapter.scaling, config.adapter.client_scaling) == (1.0, 1.0)
    assert config.training.hypergradient_mode == "difference" and config.training.method == ("pf2lora",)
    assert (config.data.validation_ratio, config.training.keep, config.training.patience) == (
        0.1,
        "best",
        None,
    )
    everyday = {name for name, choice in choices().items() if choice.panel == EVERYDAY}
    assert set(FLAGS_OF_THE_ISSUE) <= everyday


def test_toml_holds_everything(tmp_path: Path) -> None:
    for config in (Config(), other_config()):
        (tmp_path / "run.toml").write_text(to_toml(config))
        assert from_toml(tmp_path / "run.toml") == config
        assert from_dict(to_dict(config)) == config


def test_the_printed_config_names_every_setting(monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = command_line(monkeypatch, capsys, "train", "--print-config")
    assert code == 0
    for name in setting_names():
        assert re.search(rf"^(# )?{'name' if name in NAMED else name} =", out, re.M), name


def printed(monkeypatch: Any, capsys: Any, *args: object) -> Config:
    code, out, err = command_line(monkeypatch, capsys, *args, "--print-config")
    assert (code, err) == (0, "")
    return from_dict(tomllib.loads(out))


@pytest.mark.parametrize("command", ["train", "compare"])
def test_flags_toml_and_python_say_the_same(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wanted = dataclasses.replace(other_config(), methods={})
    by_flags = printed(monkeypatch, capsys, command, *as_flags(OTHERS))
    (tmp_path / "run.toml").write_text(to_toml(wanted))
    by_file = printed(monkeypatch, capsys, command, tmp_path / "run.toml")
    seen: list[Config] = []
    monkeypatch.setattr(api, "run", lambda config, out, **rest: seen.append(config))
    api.federate(**OTHERS)
    assert by_flags == by_file == seen[0] == wanted


def test_print_config_is_the_whole_of_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, _ = command_line(monkeypatch, capsys, "train", "--print-config")
    values = tomllib.loads(out)
    assert code == 0
    for table, kind in TABLES.items():
        given = {name for name, field in settings_of(kind).items() if field.default is not None}
        assert set(values[table]) == given  # TOML has no null
    assert values["output"]["out"] == "runs/train" and values["adapter"]["rank"] == 8
    assert values["data"]["test_ratio"] == 0.2 and values["task"]["name"] == "classification"


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[adapter]\nrank = 16\n[training]\nlr = 1\n[output]\nout = "there"\n'
        '[task]\ntext = "body"\nlabel = "mood"\n'
    )
    config = printed(monkeypatch, capsys, "train", file, "--rank", 4, "--label", "kind", "--out", "here")
    assert (config.adapter.rank, config.training.lr, config.output.out) == (4, 1.0, "here")
    assert to_dict(config)["task"] | {"text": "body", "label": "kind"} == to_dict(config)["task"]
    assert printed(monkeypatch, capsys, "train", file).output.out == "there"


def test_flags_are_those_of_the_task_that_the_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[task]\nname = "generation"\nbeams = 3\n')
    config = printed(monkeypatch, capsys, "train", file, "--max-new-tokens", 5)
    assert config.task == TASKS["generation"](beams=3, max_new_tokens=5)  # type: ignore[call-arg]
    code, _, err = command_line(monkeypatch, capsys, "train", file, "--stride", 5)
    assert code == 2 and "stride is a setting of question-answering, and the task is generation" in err


def test_several_values_after_one_flag(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    config = printed(
        monkeypatch,
        capsys,
        *("compare", "--method", "homlora", "local"),
        *("--clients", "a.csv", "b.csv", "--targets", "query"),
    )
    assert config.training.method == ("homlora", "local") and config.data.clients == ("a.csv", "b.csv")
    assert printed(monkeypatch, capsys, "compare").training.method == SETS["paper"]


MISTAKES: dict[str, tuple[str, str]] = {
    "unknown key": ("[adapter]\nranks = 8", r"unknown key 'ranks'; did you mean 'rank'\?"),
    "unknown table": ("[adapters]\nrank = 8", r"unknown table 'adapters'; did you mean 'adapter'\?"),
    "no table": ("rounds = 8", r"unknown table 'rounds' .*: rounds belongs in \[training\]"),
    "another task's": ("[task]\nbeams = 2", r"\[task\]: unknown key 'beams'"),
    "unknown data key": ("[data]\ntext_column = 'a'", r"\[data\]: unknown key 'text_column'"),
    "near data key": ("[data]\ntest_ration = 0.1", "did you mean 'test_ratio'"),
    "text for a number": ("[training]\nrounds = 'ten'", "rounds must be of type int, not 'ten'"),
    "fraction for a count": ("[training]\nrounds = 2.5", "rounds must be of type int, not 2.5"),
    "boolean for a count": ("[training]\nrounds = true", "rounds must be of type int, not True"),
    "number for a list": ("[adapter]\ntargets = 3", "targets must be a list of strings, not 3"),
    "list of numbers": ("[training]\nmethod = [1]", r"method must be a list of strings, not \[1\]"),
    "not a number": ("[training]\nlr = nan", "lr must be a finite number"),
    "infinite": ("[training]\nclient_lr = inf", "client_lr must be a finite number"),
    "unknown method": (
        "[training]\nmethod = ['pf2lore']",
        "unknown method 'pf2lore'; did you mean 'pf2lora'",
    ),
    "no method": ("[training]\nmethod = []", "no method is named"),
    "a method twice": ("[training]\nmethod = ['local', 'local']", "the method 'local' is named twice"),
    "unknown method table": ("[methods.hetlor]\ngamma = 1", "'hetlor'; did you mean 'hetlora'"),
    "method without a table": ("[methods]\nhetlora = 3", r"\[methods.hetlora\] must be a table"),
    "data without a table": ("data = 3", r"\[data\] must be a table"),
    "unknown precision": (
        "[model]\nprecision = 'float31'",
        "unknown precision 'float31'; did you mean 'float32'",
    ),
    "unknown task": ("[task]\nname = 'classify'", "unknown task 'classify'"),
    "no rounds": ("[training]\nrounds = 0", "rounds is 0; it must be above 0"),
    "no rate": ("[training]\nlr = 0.0", "lr is 0.0; it must be above 0"),
    "negative rate": ("[training]\nclient_lr = -1.0", "client_lr is -1.0; it must be 0 or more"),
    "negative seed": ("[training]\nseed = -1", "seed is -1; it must be 0 or more"),
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
    training = from_settings({"client_lr": 0, "lr": 1, "dropout": 0}).training
    assert (training.client_lr, training.lr) == (0.0, 1.0) and isinstance(training.lr, float)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, err = command_line(monkeypatch, capsys, "train", tmp_path / "none.toml")
    assert (code, out) == (2, "") and "no such config file" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_ration": 0.1}, "unknown setting 'test_ration'; did you mean 'test_ratio'"),
        ({"client_rang": 1}, "did you mean 'client_rank'"),
        ({"rounds": "5"}, r"federate\(\) \[training\]: rounds must be of type int"),
        ({"lr": math.nan}, "lr must be a finite number"),
    ],
)
def test_mistakes_in_python(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        api.federate(model="m", clients="a.jsonl", **settings)


def test_python_takes_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(api, "run", lambda config, out, **rest: seen.append(config))
    api.federate(model=Path("m"), clients=Path("a.jsonl"))
    api.federate(model="m", clients=[Path("a.jsonl"), "b.jsonl"], out=Path("o"))
    assert [c.data.clients for c in seen] == [("a.jsonl",), ("a.jsonl", "b.jsonl")]
    assert (seen[0].model.name, seen[0].output.out, seen[1].output.out) == ("m", "", "o")


@pytest.mark.parametrize("task", list(TASKS))
def test_a_row_written_as_a_record_is_read_again_as_it_was(task: str, tmp_path: Path) -> None:
    """A rehearsal's sites train on the rows that a local run has."""
    import json

    from pf2lora.tasks.classification.rows import TextRow
    from pf2lora.tasks.generation.prompts import PromptRow
    from pf2lora.tasks.question_answering.rows import QuestionRow

    context = "the key is in the salt. the key is under the stone."
    rows: dict[str, list[Any]] = {
        "classification": [TextRow("a text", "1", "and another"), TextRow("a\ttext", "b", "c")],
        "question-answering": [
            QuestionRow("q1", context, "where?", ("the key", "stone"), (24, 45), "keys"),
            QuestionRow("q2", context, "why?", (), ()),
        ],
        "generation": [PromptRow("name : A", ("one.", "two."), "A"), PromptRow("x", ("[a]",), "B")],
    }
    settings = TASKS[task]()
    own = TASKS[task](**settings.record_columns(rows[task]))
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(own.to_record(row)) + "\n" for row in rows[task]))
    assert own.rows(own.read_records(file)) == rows[task]
