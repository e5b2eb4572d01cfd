"""What the docs show fits the package as it is: config files, commands, Python, file names, the format of results."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import pf2lora
from pf2lora import cli
from pf2lora.federation.flare.provision import read_project
from pf2lora.federation.protocol.policy import read_policy
from pf2lora.federation.protocol.site_setup import read_site_file
from pf2lora.run.config import from_dict, setting_names
from pf2lora.run.result import Result, RoundRecord, SeedRun, from_json
from pf2lora.run.set_up import method_table
from pf2lora.serve.access import read_tokens

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
RESULT_PAGE = (ROOT / "docs" / "result.md").read_text(encoding="utf8")


class Block(NamedTuple):
    """A fenced block of a page, and where it begins."""

    where: str
    language: str
    text: str


def blocks(pages: list[Path]) -> list[Block]:
    found = []
    for page in pages:
        text = page.read_text(encoding="utf8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(f"{page.name}:{line}", match[1], match[2]))
    return found


def each(found: list[Block]) -> pytest.MarkDecorator:
    """A test for every block, named after its place."""
    return pytest.mark.parametrize("block", found, ids=[block.where for block in found])


# --- config files ------------------------------------------------------------------------------------------


@each([block for block in blocks([*DOCS, ROOT / "README.md"]) if block.language == "toml"])
def test_toml_is_read_by_whatever_reads_such_a_file(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    file.write_text(block.text, encoding="utf8")
    values = tomllib.loads(block.text)
    if "host" in values:
        read_project(file)
    elif "state" in values:
        read_site_file(file)
    elif "min_rows" in values:
        read_policy(file)
    elif any("token" in table for table in values.values() if isinstance(table, dict)):
        read_tokens(file, ["common", "base", "north", "south"])
    elif "project" in values:
        assert {f"pf2lora.{what}" for what in ("methods", "tasks")} >= set(values["project"]["entry-points"])
    else:
        config = from_dict(values, block.where)
        for name in config.methods:
            method_table(config, name)


# --- commands ----------------------------------------------------------------------------------------------


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words after `pf2lora` name, and the words that are left for it."""
    command = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0].endswith(".toml"):  # `reproduce` takes a file for a command
            return command.commands["run-file"], words
        name, *words = words
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    return command, words


def unknown_options(words: list[str]) -> set[str]:
    command, rest = command_of(words)
    known = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
    return {word.partition("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)} - known


def command_lines(text: str) -> Iterator[list[str]]:
    """The words after `pf2lora` of each such line of a block; a line may go on after a backslash."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("pf2lora "):
            words = shlex.split(line, comments=True)[1:]
            yield words[: words.index(">")] if ">" in words else words


@each([block for block in blocks(DOCS) if any(command_lines(block.text))])
def test_commands_exist_with_their_options_and_arguments(block: Block) -> None:
    for words in command_lines(block.text):
        assert not unknown_options(words), f"{block.where}: pf2lora {shlex.join(words)}"
        command, rest = command_of(words)
        command.make_context(words[0], rest)  # parses and runs nothing


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_commands_in_running_text_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf8"))
    for line in re.findall(r"`pf2lora ([^`\n]+)`", text):
        words = shlex.split(line)
        assert not unknown_options(words), f"{page.name}: pf2lora {line}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf8")
    named = re.findall(r"\b((?:benchmarks|docs|src|tests)/[\w./-]*\w)", text)
    linked = re.findall(r"\]\((?!https:)([^)#\s]+)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [name for name in linked if not (page.parent / name).exists()] == []


# --- Python ------------------------------------------------------------------------------------------------


@each([block for block in blocks(DOCS) if block.language == "python"])
def test_python_compiles_and_uses_names_that_exist(block: Block) -> None:
    settings = set(inspect.signature(pf2lora.federate).parameters)
    settings |= {name for task in pf2lora.TASKS.values() for name in setting_names(task)}
    tree = ast.parse(block.text, block.where)
    compile(tree, block.where, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pf2lora":
            found = import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(found, name.name)] == []
        if not (isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pf2lora"):
            continue
        assert node.attr in pf2lora.__all__, f"{block.where}: pf2lora.{node.attr} is not public"
        for call in ast.walk(tree):
            if node.attr == "federate" and isinstance(call, ast.Call) and call.func is node:
                assert {str(keyword.arg) for keyword in call.keywords} <= settings


# --- docs/result.md ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Result, SeedRun, RoundRecord])
def test_every_field_of_a_result_is_described(kind: type) -> None:
    missing = [f.name for f in dataclasses.fields(kind) if not re.search(rf'["`]{f.name}["`]', RESULT_PAGE)]
    assert missing == []


def test_the_result_that_is_shown_is_one() -> None:
    """Read and written again, it is the same: no field is missing, none is made up, all are in their order."""
    (shown,) = [text for language, text in FENCE.findall(RESULT_PAGE) if language == "jsonc"]
    content = json.loads(re.sub(r"//.*", "", shown))
    written = from_json(content, "docs/result.md").to_dict()
    assert json.dumps(written, indent=1) == json.dumps(content, indent=1)


def test_the_settings_page_is_the_settings() -> None:
    from pf2lora.cli.reference import reference

    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf8")
    assert page == reference(), "python -m pf2lora.cli.reference > docs/settings.md"


def test_the_presets_page_is_the_presets() -> None:
    from pf2lora.cli.preset_page import page

    shown = (ROOT / "docs" / "presets.md").read_text(encoding="utf8")
    assert shown == page(), "python -m pf2lora.cli.preset_page > docs/presets.md"


def test_every_public_name_is_in_the_python_page() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf8")
    for name in pf2lora.__all__:
        assert re.search(rf"`{name}\b", page), name
