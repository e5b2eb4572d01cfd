"""`pf2lora init`: what it guesses from files, asks on a terminal, writes, and refuses."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path
from typing import Any

import pytest
from little_world import command_line, sentences, write_csv, write_jsonl

from pf2lora.run.config import from_toml, to_dict
from pf2lora.run.first_config import guessed_task


class Typed(io.StringIO):
    """Somebody at a terminal who types these lines."""

    def isatty(self) -> bool:
        return True


def init(monkeypatch: Any, capsys: Any, *args: object, typed: str | None = None) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", Typed(typed) if typed is not None else io.StringIO())
    return command_line(monkeypatch, capsys, "init", *args)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: Any) -> list[Path]:
    """Clients with columns whose names say nothing."""
    monkeypatch.chdir(tmp_path)
    renamed = [
        {"nr": str(i), "opinion": row["text"], "stars": row["label"]}
        for i, row in enumerate(sentences(40, 1))
    ]
    return [write_csv(Path("data") / f"{name}.csv", renamed) for name in ("north", "south")]


def test_guesses_are_said_and_written(files: list[Path], monkeypatch: Any, capsys: Any) -> None:
    code, out, err = init(monkeypatch, capsys, "--clients", *files)
    assert (code, err) == (0, "")
    for line in ("--text opinion (a guess)", "--label stars (a guess)", "--model roberta-base (a guess)"):
        assert line in out.splitlines()
    assert "pf2lora train run.toml --dry-run" in out
    config = to_dict(from_toml(Path("run.toml")))
    assert config["task"]["text"] == "opinion" and config["task"]["label"] == "stars"
    assert config["data"]["clients"] == [str(file) for file in files]
    assert "# rounds = 20  # communication rounds" in Path("run.toml").read_text().splitlines()


def test_what_is_behind_a_comment_sign_is_the_default(
    files: list[Path], monkeypatch: Any, capsys: Any
) -> None:
    init(monkeypatch, capsys, "--clients", *files, "--method", "homlora", "local")
    written = Path("run.toml").read_text()
    settings = [line.removeprefix("# ") for line in written.splitlines()[3:]]
    Path("all.toml").write_text("\n".join(settings))
    assert tomllib.loads(written)["training"] == {"method": ["homlora", "local"]}
    assert to_dict(from_toml(Path("all.toml"))) == to_dict(from_toml(Path("run.toml")))


def test_on_a_terminal_it_asks_until_an_answer_can_be_used(
    files: list[Path], monkeypatch: Any, capsys: Any
) -> None:
    lines = [
        "nowhere/*.csv",
        "data/*.csv",
        "classify",
        "",
        "comment",
        "opinion",
        "",
        "models/mine",
        "gpu",
        "cpu",
    ]
    code, out, _ = init(monkeypatch, capsys, typed="\n".join(lines) + "\n")
    assert code == 0
    for said in (
        "no file matches 'nowhere/*.csv'",
        "unknown task 'classify'",
        "no column 'comment'",
        "'gpu'",
    ):
        assert said in out
    config = to_dict(from_toml(Path("run.toml")))
    assert config["data"]["clients"] == ["data/*.csv"] and config["model"]["device"] == "cpu"
    assert config["model"]["name"] == "models/mine" and config["task"]["text"] == "opinion"


def test_one_file_needs_the_column_of_the_client(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        row | {"where": "north" if i % 2 else "south"} for i, row in enumerate(map(dict, sentences(40, 1)))
    ]
    file = write_jsonl(tmp_path / "all.jsonl", rows)
    code, _, err = init(monkeypatch, capsys, "--clients", file)
    assert code == 2 and "--client-column is missing" in err and not Path("run.toml").exists()
    code, _, err = init(monkeypatch, capsys, "--clients", file, "--client-column", "wher")
    assert code == 2 and "did you mean 'where'" in err
    named = write_jsonl(tmp_path / "named.jsonl", [{**row, "site": row["where"]} for row in rows])
    code, out, err = init(monkeypatch, capsys, "--clients", named)
    assert code == 0 and "--client-column site (a guess)" in out


def test_nothing_is_overwritten_unasked(files: list[Path], monkeypatch: Any, capsys: Any) -> None:
    Path("run.toml").write_text("mine")
    code, _, err = init(monkeypatch, capsys, "--clients", *files)
    assert code == 2 and "--force" in err and Path("run.toml").read_text() == "mine"
    assert (
        init(monkeypatch, capsys, "--clients", *files, "--force", typed="no\n")[0] != 0
    )  # asked, no more lines
    assert Path("run.toml").read_text() == "mine"
    assert init(monkeypatch, capsys, "--clients", *files, "--force", "--yes", typed="")[0] == 0


def test_the_task_is_guessed_by_the_columns(tmp_path: Path) -> None:
    for name, row in {
        "classification": {"text": "a", "label": "b"},
        "question-answering": {"context": "a b", "question": "?", "answers": "b"},
        "generation": {"prompt": "a", "completion": "b"},
    }.items():
        file = write_jsonl(tmp_path / f"{name}.jsonl", [row])
        assert guessed_task([str(file)]) == name


def test_conversations_get_a_model_that_talks(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Also where every file has them in its own form: then no column is named."""
    monkeypatch.chdir(tmp_path)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: dict[str, Any] = {
        "one": {"messages": said},
        "two": {"instruction": "a", "input": "", "output": "b"},
    }
    files = [write_jsonl(Path(f"{name}.jsonl"), [row] * 5) for name, row in rows.items()]
    code, out, err = init(monkeypatch, capsys, "--clients", *files, "--force")
    assert (code, err) == (0, "")
    assert "--model HuggingFaceTB/SmolLM2-135M-Instruct (a guess)" in out.splitlines()
    assert "files have columns of their own, which are found by their names" in out.splitlines()
    assert "messages" not in to_dict(from_toml(Path("run.toml")))["task"]
