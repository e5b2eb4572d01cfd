"""The commands that wait for an accelerator are ones that exist: nobody finds a misspelt flag in lent time."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from pf2lora.cli import reproduce
from pf2lora.cli.presets import SETTINGS
from pf2lora.errors import UserError
from pf2lora.reproduce.presets import load_preset
from pf2lora.reproduce.regret.tasks import TASKS
from pf2lora.reproduce.regret.variants import check_tries, choose_variants
from pf2lora.run.config import in_tables

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "jobs").glob("*.txt"))
LINES = (
    line.split("#")[0].strip() for file in FILES for line in file.read_text(encoding="utf8").splitlines()
)
COMMANDS = [line for line in LINES if line]  # as in_parallel.py reads them
USAGE = typer.BadParameter.__bases__  # what typer raises of a wrong command line, wherever its version has it


def values_of(words: list[str], flag: str) -> list[str]:
    """What stands behind a flag that takes several values."""
    if flag not in words:
        return []
    rest = words[words.index(flag) + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command behind `pf2lora reproduce` and the values of its flags, read by the real command line; nothing is
    run."""
    group: Any = typer.main.get_command(reproduce.app)
    context = group.make_context("reproduce", list(words))
    name, command, rest = group.resolve_command(context, list(words))
    return str(name), command.make_context(name, rest, parent=context).params


def check_reproduction(words: list[str]) -> None:
    """What `pf2lora reproduce …` would run: tasks and variants, or runs of a preset, that there are."""
    assert words[0] == "reproduce"
    name, given = parsed(words[1:])
    if name == "regret":
        assert set(given["tasks"]) <= set(TASKS)
        check_tries(given["tries"], given["outward"])
        assert choose_variants(given["variants"])
    elif name != "ranks":
        preset = load_preset(given.get("file") or name).only(given["only"] or [])
        chosen = {k: v for k, v in given.items() if k in SETTINGS and v not in (None, (), [])}
        assert preset.with_settings(in_tables(chosen, "command line")).runs


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_is_there(command: str) -> None:
    words = shlex.split(command)
    assert words[0] == "python"
    if words[1] == "-m" and words[2] == "pytest":
        assert all((ROOT / word).is_file() for word in words[3:] if word.startswith("tests/"))
    elif words[1] == "-m":
        assert words[2] == "pf2lora"
        check_reproduction(words[3:])
    else:
        script = (ROOT / words[1]).read_text(encoding="utf8")
        for word in words[2:]:
            assert not word.startswith("--") or f'"{word}"' in script, word
        for rule in values_of(words, "--rules"):
            assert f'    "{rule}": (' in script, rule
        assert all((ROOT / word).is_file() for word in words if word.startswith("benchmarks/"))


@pytest.mark.parametrize(
    "wrong",
    [
        "reproduce regret --data-dir data --tasks vader --trys 3",
        "reproduce regret --data-dir data --tasks vader --tries three",
        "reproduce regret --data-dir data --tasks no-such-task",
        "reproduce regret --data-dir data --tasks vader --tries 9",
        "reproduce squad --only squad-v3",
        "reproduce squad --max-length 64",
        "reproduce no-such-preset",
        "reproduce ranks",
    ],
)
def test_a_misspelt_command_is_found(wrong: str) -> None:
    with pytest.raises((*USAGE, UserError, AssertionError)):
        check_reproduction(shlex.split(wrong))
