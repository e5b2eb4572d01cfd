"""The README's code runs as it stands, in a folder that holds what it names."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from little_world import command_line, make_world, sentences, write_jsonl

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """The README's pf2lora lines, without their comments."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("pf2lora ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model called roberta-base, three clinics, a newcomer's rows and more rows to measure on."""
    root = tmp_path_factory.mktemp("readme")
    world = make_world(root / "world")
    shutil.copytree(world.model, root / "roberta-base")
    (root / "clinics").mkdir()
    for path in world.clients:
        shutil.copy(path, root / "clinics" / path.name)
    write_jsonl(root / "east.jsonl", sentences(24, seed=5))
    write_jsonl(root / "more.jsonl", sentences(12, seed=6))
    return root


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[Path, str]:
    """The folder after the README's first Python block, and what that printed."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(blocks("python")[0], {})
    return folder, printed.getvalue()


def test_the_python_example_trains_and_plain_peft_loads_what_it_wrote(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = trained
    monkeypatch.chdir(folder)
    assert [line.split()[0] for line in printed.splitlines()] == ["north", "south", "west"]
    scope: dict[str, Any] = {}
    exec(blocks("python")[1], scope)
    assert scope["model"].peft_config["default"].r == 10


def test_the_commands_work_on_that_run(trained: tuple[Path, str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(trained[0])
    ran = set()
    for words in commands():
        if words[0] in ("train", "compare"):
            spread = [
                str(p) for word in words for p in (sorted(Path().glob(word)) if "*" in word else [word])
            ]
            code, _, error = command_line(monkeypatch, capsys, *spread, "--print-config")
        elif words[0] in ("predict", "evaluate", "onboard", "export"):
            rounds = ["--rounds", "1"] if words[0] == "onboard" else []
            code, _, error = command_line(monkeypatch, capsys, *words, *rounds)
        else:
            continue
        assert code == 0, (words, error)
        ran.add(words[0])
    assert ran == {"train", "compare", "predict", "evaluate", "onboard", "export"}


def test_the_tree_names_every_module() -> None:
    source = Path(__file__).parents[2] / "src" / "pf2lora"
    tree = README.split("## The tree")[1]
    for path in source.iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        if not name.startswith("__") and name != "py.typed":
            assert name in tree, f"{name} is missing in the README's tree"
