"""The choice of data, and `pf2lora data show`: its table and its figure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import loading
import pytest
from loading import load_clients
from rich.console import Console
from tiny_tasks import write_generation_task, write_question_task
from typer.testing import CliRunner

from pf2lora.cli.data import app
from pf2lora.cli.example import print_example
from pf2lora.cli.options import spread_lists
from pf2lora.data import summary as summaries
from pf2lora.data.client import Client
from pf2lora.data.summary import Summary
from pf2lora.errors import UserError
from pf2lora.tasks.base import Shown
from pf2lora.tasks.classification.rows import TextRow

Settings = dict[str, Any]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Three files of 40 rows: labels, and a topic that has nothing to do with the file."""
    for name in ("north", "south", "west"):
        rows = [
            {"text": f"{name} {i}", "label": "no" if i % 4 else "yes", "topic": f"t{i % 5}"}
            for i in range(40)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def sst2(tmp_path: Path) -> Path:
    for name, rows in (("train", 400), ("dev", 80)):
        lines = ["sentence\tlabel", *(f"{name} {i}\t{i % 2}" for i in range(rows))]
        (tmp_path / "SST-2").mkdir(exist_ok=True)
        (tmp_path / "SST-2" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, ["show", *args], env={"COLUMNS": "120"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# --- the choice --------------------------------------------------------------------------------------------


def all_rows(clients: list[Client[TextRow]]) -> list[str]:
    return sorted(row.text for client in clients for row in [*client.train, *client.test])


def test_files_as_they_are(files: Path) -> None:
    clients = load_clients([files])
    assert [(c.name, len(c.train), len(c.test)) for c in clients] == [
        ("north", 32, 8),
        ("south", 32, 8),
        ("west", 32, 8),
    ]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"partition": "heterogeneity", "num_clients": 2}, ["client-1", "client-2"]),
        ({"partition": "dirichlet", "num_clients": 2, "dirichlet_alpha": 5}, ["client-1", "client-2"]),
        ({"partition": "column", "partition_column": "topic"}, ["t0", "t1", "t2", "t3", "t4"]),
        ({"partition": "column", "partition_column": "topic", "num_clients": 2}, ["client-1", "client-2"]),
        (
            {"partition": "groups", "partition_column": "topic", "groups": ("x=t0, t1", "y=t2,t3,t4")},
            ["x", "y"],
        ),
    ],
)
def test_pooled_files_are_shared_out(files: Path, choice: Settings, names: list[str]) -> None:
    clients = load_clients([f"{files}/*.jsonl"], **choice)
    assert [client.name for client in clients] == names
    assert all_rows(clients) == sorted(
        f"{name} {i}" for name in ("north", "south", "west") for i in range(40)
    )
    assert clients == load_clients([f"{files}/*.jsonl"], **choice)
    if "partition_column" in choice:
        owners = {
            topic: {
                c.name
                for c in clients
                for row in [*c.train, *c.test]
                if int(row.text.split()[1]) % 5 == topic
            }
            for topic in range(5)
        }
        assert all(len(owner) == 1 for owner in owners.values())


def test_separate_test_files_are_pooled_too(files: Path) -> None:
    test = files / "held-out.csv"
    test.write_text("text,label,topic\n" + "".join(f"held {i},yes,t{i}\n" for i in range(5)))
    clients = load_clients([f"{files}/*.jsonl"], test=[test], partition="column", partition_column="topic")
    assert [[row.text for row in c.test] for c in clients] == [[f"held {i}"] for i in range(5)]


def test_glue_by_heterogeneity(sst2: Path) -> None:
    clients = load_clients(dataset="sst2", data_dir=sst2, heterogeneity=1, num_clients=4)
    for part in ("train", "test"):
        counts = [Counter(row.label for row in getattr(client, part)) for client in clients]
        size = 100 if part == "train" else 20
        assert counts == [{"negative": size}] * 2 + [{"positive": size}] * 2


def test_size_ratio_and_limit(sst2: Path) -> None:
    settings: Settings = {"dataset": "sst2", "data_dir": sst2, "num_clients": 4}
    sizes = sorted(len(client.train) for client in load_clients(**settings, size_ratio=8))
    assert sum(sizes) == 400
    assert sizes[-1] / sizes[0] == pytest.approx(8, rel=0.1)
    few = load_clients(**settings, limit=10)
    assert [len(client.train) for client in few] == [10] * 4
    assert sum(len(client.test) for client in few) == 80
    tested = load_clients(**settings, test_limit=5)
    assert [len(client.test) for client in tested] == [5] * 4
    assert sum(len(client.train) for client in tested) == 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one"),
        ({"clients": ("a.csv",), "dataset": "sst2"}, "give one"),
        ({"clients": ("a.csv",), "partition": "dirichlt"}, "did you mean 'dirichlet'"),
        ({"dataset": "sst2", "text": "sentence"}, "--text is for your own files"),
        ({"clients": ("a.csv",), "data_dir": "x"}, "name the set with --dataset"),
        (
            {"clients": ("a.csv",), "partition": "dirichlet", "client_column": "c"},
            "--client-column and --partition",
        ),
        ({"dataset": "mnli", "partition": "column"}, "needs --partition-column"),
        ({"dataset": "mnli", "partition_column": "genre"}, "--partition-column is for"),
        ({"dataset": "mnli", "groups": ("a=b",)}, "go together"),
        ({"clients": ("a.csv",), "num_clients": 3}, "--num-clients"),
    ],
)
def test_contradictions_are_errors(settings: Settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_clients(settings.pop("clients", []), **settings)


def test_bad_choices_for_the_rows_there_are(files: Path) -> None:
    pooled: Settings = {"partition": "groups", "partition_column": "topic"}
    cases: list[tuple[Settings, str]] = [
        (pooled | {"groups": ("x",)}, "'x' is not a group: write name=value,value"),
        (pooled | {"groups": ("x=t0", "x=t1")}, "two groups are named 'x'"),
        (pooled | {"groups": ("x=t0",)}, "value 't1' belong to no client"),
        (pooled | {"partition_column": "topics", "groups": ("x=t0",)}, "did you mean 'topic'"),
        (
            {"partition": "heterogeneity", "num_clients": 40},
            "test rows: 40 clients",
        ),
        (
            {"partition": "heterogeneity", "num_clients": 20, "size_ratio": 30},
            r"client 'client-\d+' would get [12] training and 1 test rows; at least 4",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(UserError, match=message):
            load_clients([files], **settings)


def test_importing_the_data_commands_stays_light() -> None:
    heavy = ("torch", "transformers", "pandas", "sklearn", "matplotlib", "datasets", "pyarrow")
    code = f"import sys, pf2lora.cli.data; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# --- the command -----------------------------------------------------------------------------------------


def test_show_prints_sizes_and_shares(files: Path) -> None:
    given = ("--clients", *map(str, sorted(files.glob("*.jsonl"))), "--test-ratio", "0.1")
    output = invoke(*given, "--validation-ratio", "0")
    for name in ("north", "south", "west"):
        line = next(line for line in output.splitlines() if line.split()[:1] == [name])
        assert line.split() == [name, "36", "4", "██████", "75%", "██", "25%"]
    assert "skew 0.00" in output and "validation" not in output
    for line in invoke(*given).splitlines():  # a small client gives a fifth of its training rows to choose by
        if line.split()[:1] in (["north"], ["south"], ["west"]):
            assert line.split()[1:4] == ["29", "7", "4"]
        if line.split()[:1] == ["all"]:
            assert line.split()[1:4] == ["87", "21", "12"]
            break
    else:
        pytest.fail("no totals")


def test_show_glue_with_figure(sst2: Path, tmp_path: Path) -> None:
    figure = tmp_path / "new folder" / "clients.svg"
    args = ["--dataset", "sst2", "--data-dir", str(sst2), "--num-clients", "3", "--figure", str(figure)]
    output = invoke(*args)
    assert "SST-2, heterogeneity 0.9" in output
    texts = [element.text for element in ElementTree.parse(figure).iter("{http://www.w3.org/2000/svg}text")]
    assert {"client-1", "client-3", "negative", "positive", "SST-2, heterogeneity 0.9"} <= set(texts)
    drawn = figure.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        invoke(*args)
    invoke(*args, "--force")
    assert figure.read_bytes() == drawn  # the same data gives the same file


def test_figure_of_an_unknown_kind(sst2: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"written as \.svg, \.png, \.pdf"):
        invoke("--dataset", "sst2", "--data-dir", str(sst2), "--figure", str(tmp_path / "a.txt"))


def test_names_are_not_markup(tmp_path: Path) -> None:
    for name in ("a[b]", "c$d_"):
        rows = [{"text": f"t{i}", "label": f"[red]{i % 2}"} for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = invoke("--clients", str(tmp_path), "--figure", str(tmp_path / "f.png"))
    assert "a[b]" in output and "[red]1" in output
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_lists_end_at_the_next_option() -> None:
    assert spread_lists(
        ["--clients", "a", "b", "--seed", "1", "--test", "c", "run.toml"], {"--clients", "--test"}
    ) == [*("--clients", "a", "--clients", "b", "--seed", "1", "--test", "c", "run.toml")]


# --- numbers ---------------------------------------------------------------------------------------------


def client(name: str, labels: str) -> Client[TextRow]:
    rows = [TextRow("t", label) for label in labels]
    return Client(name, rows, rows[:1])


def summarize(clients: list[Client[TextRow]]) -> Summary:
    return summaries.summarize(clients, lambda row: row.label)


def test_summary_counts_and_skew() -> None:
    summary = summarize([client("x", "aab"), client("y", "bbbb")])
    assert summary.labels == ["a", "b"]
    assert summary.train.tolist() == [[2, 1], [0, 4]]
    assert summary.test.tolist() == [[1, 0], [0, 1]]
    assert summary.skew == pytest.approx(((2 / 3 - 2 / 7) + 2 / 7) / 2)
    assert summarize([client("x", "aabb"), client("y", "ab")]).skew == 0


def test_summary_joins_rare_labels() -> None:
    few = summarize([client("x", "aaabbbbcdd"), client("y", "e")]).with_most(3)
    assert few.labels == ["a", "b", "other (3)"]
    assert few.train.tolist() == [[3, 4, 3], [0, 0, 1]]


# --- a row as the model sees it ----------------------------------------------------------------------------


def test_a_row_as_the_model_sees_it(tmp_path: Path) -> None:
    """For every task: what the model is to find stands between marks in a pipe, and the label below."""
    model, files = write_generation_task(tmp_path / "generation", ["north", "south"])
    given = ["--task", "generation", "--clients", *map(str, files), "--model", str(model)]
    out = invoke(*given, "--client", "south", "--example", "2")
    row = loading.load_clients(files, task="generation")[1].train[1]
    letters = "·".join
    target = f" {row.targets[0]}"
    assert f"\n{letters(row.prompt)}·<|endoftext|>·«{letters(target)}·<|endoftext|>»\n" in out
    length = len(row.prompt) + 1 + len(target) + 1
    assert f"loss on {len(target) + 1} of {length} tokens" in out and "south, row 2, as" in out
    model, files = write_question_task(tmp_path / "questions", ["north", "south"])
    given = ["--task", "question-answering", "--clients", *map(str, files), "--model", str(model)]
    rows = loading.load_clients(files, task="question-answering")[0].train
    answered = next(i for i, row in enumerate(rows) if row.answers)
    out = invoke(*given, "--example", str(answered + 1))
    assert f"·«{rows[answered].answers[0]}»·" in out and f"answer: {rows[answered].answers[0]}" in out
    silent = next(i for i, row in enumerate(rows) if not row.answers)
    assert "\n«[CLS]»·where·is" in invoke(*given, "--example", str(silent + 1))


def test_in_colour_on_a_terminal(capsys: Any) -> None:
    shown = Shown(["[red]", "a\n", "\x1b[2J", " b"], [False, False, True, True], "label: \x07")
    for terminal, found in (
        (True, "\x1b[1;32m\\x1b[2J· b\x1b[0m"),
        (False, "[red]·a⏎\n·«\\x1b[2J· b»\nlabel: \\x07\n"),
    ):
        print_example(shown, Console(force_terminal=terminal, color_system="standard" if terminal else None))
        out = capsys.readouterr().out
        assert found in out and ("«" in out) != terminal


def test_rows_that_are_not_there(files: Path, tmp_path: Path) -> None:
    model, _ = write_question_task(tmp_path / "questions", ["north"])
    for args, message in (
        (["--client", "nrth"], "no client 'nrth'; the clients: north, south, west"),
        (["--example", "100"], "client 'north' has 26 training rows, and no row 100"),
    ):
        with pytest.raises(UserError, match=message):
            invoke("--clients", str(files), "--model", str(model), *args)
