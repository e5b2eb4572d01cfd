"""The commands that wait for an accelerator are ones that exist: nobody finds a misspelt flag in lent time."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pf2lora.reproduce.presets import load_preset
from pf2lora.reproduce.regret.tasks import TASKS
from pf2lora.reproduce.regret.variants import choose_variants

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "jobs" / "accelerator.txt"
LINES = (line.split("#")[0].strip() for line in FILE.read_text(encoding="utf8").splitlines())
COMMANDS = [line for line in LINES if line]  # as in_parallel.py reads them


def values_of(words: list[str], flag: str) -> list[str]:
    """What stands behind a flag that takes several values."""
    if flag not in words:
        return []
    rest = words[words.index(flag) + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_is_there(command: str) -> None:
    words = shlex.split(command)
    assert words[0] == "python"
    if words[1] == "-m" and words[2] == "pytest":
        assert all((ROOT / word).is_file() for word in words[3:] if word.startswith("tests/"))
    elif words[1] == "-m":
        assert words[2:4] == ["pf2lora", "reproduce"]
        if words[4] == "regret":
            assert set(values_of(words, "--tasks")) <= set(TASKS)
            assert choose_variants(values_of(words, "--variants"))
        else:
            runs = {run.name for run in load_preset(words[4]).runs}
            assert {words[i + 1] for i, word in enumerate(words) if word == "--only"} <= runs
    else:
        script = (ROOT / words[1]).read_text(encoding="utf8")
        for word in words[2:]:
            assert not word.startswith("--") or f'"{word}"' in script, word
        assert all((ROOT / word).is_file() for word in words if word.startswith("benchmarks/"))
