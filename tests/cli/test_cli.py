"""The command line as a user meets it: quick help, bad input in one line and exit code 2, readable output."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from little_world import World, command_line, make_world, sentences, write_csv, write_jsonl
from result_example import make_result, typed, without_choices
from rich.console import Console

from pf2lora.cli import show

HEAVY = ("torch", "transformers", "pandas", "sklearn", "matplotlib", "peft", "nvflare", "huggingface_hub")
COPIED = ("  pf2lora", "Each client's adapter", "warning")  # lines that are not broken, as paths are copied
COMMANDS = ("demo", "train", "compare", "predict", "evaluate", "onboard", "export", "report", "data")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def pf2lora(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, at the width of a small terminal."""
    command = [sys.executable, "-c", "from pf2lora.cli import main; main()", *map(str, args)]
    variables = os.environ | {"COLUMNS": "80"} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pf2lora.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        before = cpu_seconds_of_children()  # not the clock: other work on the machine is not ours
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds.append(cpu_seconds_of_children() - before)
        assert done.stdout.splitlines()[-1] == "HEAVY []"
        for command in COMMANDS:
            assert command in done.stdout
    assert min(seconds) < 0.8, seconds  # 0.53 seen on a busy machine


@pytest.mark.parametrize("command", ["train", "compare"])
def test_every_everyday_flag_is_in_the_help(command: str) -> None:
    shown = pf2lora(command, "--help", COLUMNS="200")
    assert shown.returncode == 0
    for flag in (
        *(
            "--model",
            "--clients",
            "--method",
            "--rounds",
            "--steps",
            "--batch-size",
            "--rank",
            "--client-rank",
        ),
        *("--lr", "--client-lr", "--seed", "--device", "--precision", "--out", "--print-config", "--force"),
    ):
        assert f"{flag} " in shown.stdout, flag


def test_a_version_and_an_unknown_option() -> None:
    assert pf2lora("--version").stdout.strip().count(".") == 2
    wrong = pf2lora("train", "--rangs", "3")
    assert wrong.returncode == 2 and "--rangs" in wrong.stderr and "Traceback" not in wrong.stderr


# --- bad input ---------------------------------------------------------------------------------------------

Prepared = tuple[list[object], str]  # further arguments, and what the line says
GOOD = sentences(12, seed=3)


def one_file(world: World, folder: Path, rows: list[Any], name: str = "bad.jsonl") -> list[object]:
    """The world's clients and one more."""
    writer = write_csv if name.endswith(".csv") else write_jsonl
    return ["--clients", *world.clients, writer(folder / name, rows)]


def broken_line(world: World, folder: Path) -> Prepared:
    file = folder / "bad.jsonl"
    file.write_text(json.dumps(dict(GOOD[0])) + '\n{"text": "half a li\n')
    return ["--clients", file], "bad.jsonl, line 2: broken JSON"


def unseen_label(world: World, folder: Path) -> Prepared:
    test = [write_jsonl(folder / p.name, GOOD) for p in world.clients]
    write_jsonl(test[1], [*GOOD, {"text": "the film", "label": "so-so"}])
    return ["--test", *test], "south.jsonl, line 13: the label 'so-so' is unseen in training"


def bare_model(world: World, folder: Path) -> Prepared:
    (folder / "bare").mkdir()
    for file in world.model.iterdir():
        if file.suffix != ".safetensors":
            (folder / "bare" / file.name).write_bytes(file.read_bytes())
    return ["--model", folder / "bare"], "has no weights (model.safetensors)"


def model_without_tokenizer(world: World, folder: Path) -> Prepared:
    (folder / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "bare" / name).write_bytes((world.model / name).read_bytes())
    return ["--model", folder / "bare"], "has no tokenizer (tokenizer.json)"


def damaged_weights(world: World, folder: Path) -> Prepared:
    (folder / "bad").mkdir()
    for file in world.model.iterdir():
        (folder / "bad" / file.name).write_bytes(file.read_bytes()[: 200 if "model.s" in file.name else None])
    return ["--model", folder / "bad"], "cannot be loaded: Error while deserializing header"


def unknown_architecture(world: World, folder: Path) -> Prepared:
    (folder / "odd").mkdir()
    for file in world.model.iterdir():
        (folder / "odd" / file.name).write_bytes(b"{}" if file.name == "config.json" else file.read_bytes())
    return ["--model", folder / "odd"], "cannot be loaded: Unrecognized model"


def held_folder(world: World, folder: Path) -> Prepared:
    (folder / "result.json").write_text("{}")
    return [
        "--out",
        folder,
    ], "holds another run (result.json); choose another --out, or --force to replace it"


BAD: dict[str, Callable[[World, Path], Prepared]] = {
    "missing file": lambda w, f: (["--clients", f / "none.jsonl"], "none.jsonl: no such file"),
    "nothing matches": lambda w, f: (["--clients", f / "*.jsonl"], "no file matches"),
    "wrong column": lambda w, f: (
        ["--text", "texte"],
        "no column 'texte' (named by --text); did you mean 'text'?",
    ),
    "one label only": lambda w, f: (
        ["--clients", write_jsonl(f / "a.jsonl", [{"text": f"a {i}", "label": "pos"} for i in range(9)])],
        "only one label, 'pos', in all training rows",
    ),
    "two rows": lambda w, f: (one_file(w, f, GOOD[:2]), "client 'bad' has 2 rows; at least 4 are needed"),
    "empty text": lambda w, f: (
        one_file(w, f, [*GOOD, {"text": " ", "label": "pos"}], "bad.csv"),
        "bad.csv, line 14: empty text in column 'text'",
    ),
    "unseen label": unseen_label,
    "broken line": broken_line,
    "model folder without weights": bare_model,
    "model folder without tokenizer": model_without_tokenizer,
    "damaged weights": damaged_weights,
    "unknown architecture": unknown_architecture,
    "no such model folder": lambda w, f: (["--model", f / "none"], "there is no model folder"),
    "hub out of reach": lambda w, f: (
        ["--model", "roberta-base"],
        "could not be fetched from the Hugging Face hub (no network, no such model, or no access to it); where there "
        "is no hub, give a folder",
    ),
    "another run": held_folder,
    "unknown device": lambda w, f: (
        ["--device", "gpu"],
        "unknown device 'gpu'; give auto, cpu, cuda or cuda:N",
    ),
    "unknown method": lambda w, f: (["--method", "fedavg"], "unknown method 'fedavg'"),
    "several methods": lambda w, f: (["--method", "local", "homlora"], "'pf2lora compare' takes several"),
    "client rank too large": lambda w, f: (["--client-rank", "4"], "client_rank is 4 and rank 4"),
    "unknown head": lambda w, f: (["--head", "own"], "head is 'own'"),
    "participation": lambda w, f: (["--participation", "2"], "participation is 2.0"),
    "weighting": lambda w, f: (["--weighting", "rows"], "weighting is 'rows'"),
    "unknown target": lambda w, f: (["--targets", "queri"], "no layer matches the target 'queri'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    changes, message = BAD[case](world, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.chdir(tmp_path)
    code, out, err = command_line(monkeypatch, capsys, "train", *merged(world.base, changes))
    assert code == 2 and err.startswith("pf2lora: ") and err.count("\n") == 1, (out, err)
    assert message in err and "Traceback" not in out
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def merged(base: list[str], changes: list[object]) -> list[object]:
    """`base` without the flags that `changes` gives anew."""
    given = {str(word) for word in changes if str(word).startswith("--")}
    kept: list[object] = []
    keeping = True
    for word in base:
        if word.startswith("--"):
            keeping = word not in given
        if keeping:
            kept.append(word)
    return [*kept, *changes]


def test_no_model_and_no_data(monkeypatch: pytest.MonkeyPatch, capsys: Any, world: World) -> None:
    for args, message in (
        (["train", "--clients", *world.clients], "no base model is named"),
        (["train", "--model", world.model], "data comes from files (--clients FILES…) or from a data set"),
    ):
        code, out, err = command_line(monkeypatch, capsys, *args)
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err


def test_the_process_itself_ends_with_2(world: World, tmp_path: Path) -> None:
    done = pf2lora("train", *world.base, "--out", tmp_path / "run", "--label", "mood")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no column 'mood' (named by --label)" in done.stderr


def test_a_shells_unquoted_glob(world: World, tmp_path: Path) -> None:
    """A whole run in a process of its own: what a shell makes of clients/*.jsonl, and a file of settings."""
    (tmp_path / "run.toml").write_text(
        "[training]\nrounds = 1\nsteps = 1\nbatch_size = 4\n[adapter]\nrank = 4\n[task]\nmax_length = 16\n"
    )
    args = ["train", "--clients", *world.clients, tmp_path / "run.toml", "--model", world.model]
    done = pf2lora(*args, "--out", tmp_path / "run", "--device", "cpu")
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(p.name for p in (tmp_path / "run" / "clients").iterdir()) == ["north", "south", "west"]
    _, *table, report = done.stdout.splitlines()
    table = [line for line in table if not line.startswith(COPIED)]
    assert all(len(line) <= 80 for line in table) and report == f"report: {tmp_path / 'run' / 'report.html'}"


# --- what is printed ---------------------------------------------------------------------------------------


def shown(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    console = Console(width=80, record=True, force_terminal=False)
    monkeypatch.setattr(show, "console", console)
    show.show_result(typed(result), Path("runs/x"))
    return console.export_text()


def test_deploy_decides_and_what_was_chosen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = make_result()
    text = shown(result, monkeypatch)
    narrow = [line for line in text.splitlines() if not line.startswith(COPIED)]
    assert all(len(line.rstrip()) <= 80 for line in narrow)
    head = " ".join(next(line for line in text.splitlines() if line.strip().startswith("method")).split())
    assert head == "method served averaging deploy client round time"
    for method in result["methods"].values():
        assert f"{method['label']} deploys: " in text
    for run in result["methods"]["local"]["runs"]:
        run["deploy"] = None
    mixed = shown(result, monkeypatch)  # one method has none: served decides
    local = next(line for line in mixed.splitlines() if line.strip().startswith("Local "))
    assert local.split()[3] == "–"
    assert "deploys" not in shown(without_choices(result), monkeypatch)


def test_one_methods_choices_are_said_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    result = make_result(clients=2, seeds=1, rounds=4)
    result["methods"] = {"pf2lora": result["methods"]["pf2lora"]}
    run = result["methods"]["pf2lora"]["runs"][0]
    run["choices"][0] |= {"candidate": "served", "round": 2}
    run["choices"][1] |= {"candidate": "personal_steps", "round": 4}
    text = " ".join(shown(result, monkeypatch).split())
    assert "deploy: clinic-a: served in round 2; clinic-b: after personal steps Each client" in text
    assert "worst client" not in text and "client spread" in text  # one seed: there is room for the spread


def test_many_warnings_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    result = make_result()
    method = next(iter(result["methods"].values()))
    for other in result["methods"].values():
        for run in other["runs"]:
            run["warnings"] = []
    method["runs"][0]["warnings"] = [
        f"client 'c{i}': the training loss rose above its start" for i in range(9)
    ]
    text = shown(result, monkeypatch)
    assert "client 'c0'" in text and "client 'c8'" not in text
    assert f"and {9 - show.WARNINGS_SHOWN} more" in " ".join(text.split())
