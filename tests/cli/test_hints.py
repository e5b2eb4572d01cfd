"""Hints as a stranger reads them: brackets stay, a default is the command's own, no label steers the terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from little_world import FAST, command_line, flags, make_world, sentences, write_jsonl
from result_example import make_result, typed
from rich.console import Console

from pf2lora.cli import show
from pf2lora.cli.options import read_config
from pf2lora.cli.text import safe
from pf2lora.errors import UserError, missing_extra
from pf2lora.run.events import Note
from pf2lora.run.plain_log import Lines
from pf2lora.run.screen import Screen

EVIL = "[red]pos[/red] \x1b[2J\x9b"
HINT = "pip install 'pf2lora[nlg]'"


def test_each_command_says_its_own_default_method(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command, default in (("train", "pf2lora"), ("compare", "paper")):
        _, out, _ = command_line(monkeypatch, capsys, command, "--help")
        about = out.partition("--method ")[2].partition("--rounds ")[0]
        assert f"(default: {default})" in " ".join(about.split())


def test_brackets_are_printed(monkeypatch: Any, capsys: Any) -> None:
    line = str(missing_extra("sacrebleu", "nlg", "BLEU"))
    assert HINT in line
    show.show_note(line)
    Lines()(Note(line))
    screen = Screen()
    screen.console = Console(file=io.StringIO(), width=200)
    screen(Note(line))
    out, err = capsys.readouterr()
    assert HINT in out and HINT in err and HINT in screen.console.file.getvalue()  # type: ignore[attr-defined]
    result = make_result(clients=2, seeds=1, rounds=2)
    method = next(iter(result["methods"].values()))
    method["runs"][0]["warnings"] = [line]
    console = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(show, "console", console)
    show.show_result(typed(result), Path("runs/x"))
    assert HINT in console.export_text()


@pytest.mark.parametrize("text", [EVIL, "a\\", "[/]", "[bold", "tab\there"])
def test_foreign_text_is_printed_as_it_stands(text: str) -> None:
    console = Console(width=200, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]{safe(text)}[/bold]!", highlight=False)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    plain = written.replace("\x1b[1m", "").replace("\x1b[0m", "")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    assert plain == f"{shown}!\n"


def test_labels_and_texts_do_not_steer_the_terminal(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    world = make_world(tmp_path)
    rows = [
        {"text": row["text"] + " \x1b]0;mine\x07", "label": EVIL if row["label"] == "pos" else row["label"]}
        for row in sentences(40, 1)
    ]
    files = [write_jsonl(tmp_path / "evil" / f"{name}.jsonl", rows) for name in ("a", "b")]
    settings = FAST | {"rounds": 1, "steps": 1}
    data = ["--clients", *files]
    training = [*data, "--model", world.model, *flags(settings), "--out", tmp_path / "run"]
    used = [tmp_path / "run", "--client", "a"]
    for args in (
        ["data", "show", *data],
        ["train", *training, "--dry-run"],
        ["train", *training],
        ["predict", *used, "--file", files[0]],
        ["evaluate", *used, files[0]],
    ):
        code, out, err = command_line(monkeypatch, capsys, *args)
        assert code == 0, err
        assert not set("\x1b\x9b\x07") & set(out + err), args
        if args[0] == "data":
            assert "[red]" in out


@pytest.mark.parametrize("name", ["north.csv", "north.jsonl.gz"])
def test_a_file_of_rows_is_no_run_file(name: str) -> None:
    with pytest.raises(
        UserError, match=f"{name}: a run file ends with .toml; files of rows stand behind --clients"
    ):
        read_config({}, Path(name))
