"""The eighteen inputs that once gave a traceback, each by its name: one line, exit code 2, and no file is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hardship import contents, forbidden, full_disk, open_folder, small_disk
from little_world import World, command_line, make_world, sentences, write_jsonl

from pf2lora.report import build
from pf2lora.run.result import load_result

Command = Any


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_folder() as folder:
        made = make_world(folder)
        for path in folder.rglob("*"):  # the model's weights are their owner's alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield made


@pytest.fixture(scope="module", autouse=True)
def run(world: World) -> Path:
    """A run in it; by then all modules are loaded, which a program without root's rights might not be able to."""
    from pf2lora import federate

    federate(**world.settings(out=world.root / "run"))
    for folder in (world.root / "run", *(world.root / "run").rglob("*/")):
        folder.chmod(0o777)  # anybody may write, until a test forbids it
    return world.root / "run"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Command:
    """Runs a command that must be refused; its one line."""

    def refuse(*args: object) -> str:
        code, _, err = command_line(monkeypatch, capsys, *args)
        lines = [line for line in err.splitlines() if not line.startswith("Glyph")]
        assert code == 2 and len(lines) == 1 and lines[0].startswith("pf2lora: "), err
        return lines[0]

    return refuse


@pytest.fixture
def newcomer(world: World) -> Path:
    return write_jsonl(world.root / "east.jsonl", sentences(40, 9))


# --- a full disk -------------------------------------------------------------------------------------------


def test_1_a_full_disk_in_train(world: World, tmp_path: Path, refused: Command) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        line = refused("train", *world.base, "--out", disk / "run")
        assert ("disk is full" in line or "No space left" in line) and str(disk) in line
        assert not [name for name in contents(disk) if name.endswith(".partial")]


def test_1_a_disk_that_is_full_from_the_first_file_on(
    world: World, tmp_path: Path, refused: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk(monkeypatch):
        line = refused("train", *world.base, "--out", tmp_path / "run")
    assert ("disk is full" in line or "No space left" in line) and contents(tmp_path) == {}


def test_2_a_full_disk_in_export_merge(run: Path, tmp_path: Path, refused: Command) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        line = refused("export", run, "--client", "north", "--merge", "--out", disk / "deep" / "model")
        assert "No space left on device" in line and str(disk / "deep" / "model") in line
        assert list(disk.iterdir()) == []


def test_3_a_full_disk_in_onboard(
    run: Path, newcomer: Path, refused: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(run)
    for after in range(8):  # its five files, the names, the result and the report
        with full_disk(monkeypatch, after):
            line = refused("onboard", run, newcomer, "--client", "east", "--rounds", "1")
        assert "No space left on device" in line and contents(run) == before


@pytest.mark.parametrize("after", [0, 1])
def test_4_a_full_disk_leaves_no_temporary_file_of_the_report(
    run: Path, tmp_path: Path, refused: Command, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    if after:  # there is a report already, which stays as it was
        build(load_result(run), tmp_path / "report.html")
    before = contents(tmp_path)
    with full_disk(monkeypatch):
        line = refused("report", run, "--out", tmp_path / "report.html")
    assert "No space left on device" in line and "as it was" in line and contents(tmp_path) == before


def test_4_an_interrupted_report_leaves_no_temporary_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(load_result(run), tmp_path / "report.html")
    assert contents(tmp_path) == {}


# --- no permission -----------------------------------------------------------------------------------------


def test_5_a_figure_where_nothing_may_be_written(world: World, refused: Command) -> None:
    folder = world.root / "figures"
    folder.mkdir(exist_ok=True)
    with forbidden(folder, 0o555):
        line = refused("data", "show", "--clients", *world.clients, "--figure", folder / "a.svg")
    assert "nothing may be written into" in line and contents(folder) == {}


def test_6_a_figure_in_a_folder_that_may_not_be_looked_into(world: World, refused: Command) -> None:
    folder = world.root / "closed"
    (folder / "in").mkdir(parents=True, exist_ok=True)
    with forbidden(folder, 0o000):
        line = refused("data", "show", "--clients", *world.clients, "--figure", folder / "in" / "a.svg")
    assert "no permission" in line and str(folder) in line


@pytest.mark.parametrize("command", ["train", "compare"])
def test_7_and_8_an_out_where_nothing_may_be_written(world: World, refused: Command, command: str) -> None:
    folder = world.root / "outs"
    folder.mkdir(exist_ok=True)
    with forbidden(folder, 0o555):
        line = refused(command, *world.base, "--out", folder / "deep" / "run")
    assert f"nothing may be written into {folder}" in line and contents(folder) == {}


def test_9_an_out_that_may_not_be_looked_into(world: World, refused: Command) -> None:
    folder = world.root / "closed-out"
    folder.mkdir(exist_ok=True)
    with forbidden(folder, 0o000):
        line = refused("train", *world.base, "--out", folder / "run")
    assert "no permission" in line


@pytest.mark.parametrize("merge", [[], ["--merge"]])
def test_10_and_11_an_export_where_nothing_may_be_written(
    world: World, run: Path, refused: Command, merge: list[str]
) -> None:
    folder = world.root / "exports"
    folder.mkdir(exist_ok=True)
    with forbidden(folder, 0o555):
        line = refused("export", run, "--client", "north", *merge, "--out", folder / "model")
    assert f"nothing may be written into {folder}" in line and contents(folder) == {}


def test_12_onboard_into_a_read_only_run(run: Path, newcomer: Path, refused: Command) -> None:
    before = contents(run)
    for folder in ("clients", "state", "state/clients"):
        with forbidden(run / folder, 0o555):
            line = refused("onboard", run, newcomer, "--client", "east", "--rounds", "1")
        assert f"nothing may be written into {run / folder}" in line and contents(run) == before


def test_13_a_config_that_may_not_be_read(world: World, run: Path, refused: Command) -> None:
    for args in (["train", run / "config.toml"], ["predict", run, "a text"]):
        with forbidden(run / "config.toml", 0o000):
            line = refused(*args)
        assert "no permission" in line and "config.toml" in line


def test_14_a_state_that_may_not_be_read(run: Path, refused: Command) -> None:
    for file in ("state", "state/run.json", "state/clients", "state/clients/north.safetensors"):
        with forbidden(run / file, 0o000):
            line = refused("predict", run, "a text", "--client", "north")
        assert "no permission" in line and str(run / "state") in line


def test_14_a_result_that_may_not_be_read(run: Path, refused: Command) -> None:
    with forbidden(run / "result.json", 0o000):
        assert "no permission" in refused("report", run)


def test_data_that_may_not_be_read(world: World, refused: Command) -> None:
    files = world.clients
    for path in (files[0], files[0].parent):
        with forbidden(path, 0o000):
            line = refused("data", "show", "--clients", *files)
        assert "no permission" in line


# --- what is no such file ----------------------------------------------------------------------------------


def test_15_a_folder_given_as_a_config_file(tmp_path: Path, refused: Command) -> None:
    folder = tmp_path / "run.toml"
    folder.mkdir()
    assert refused("train", folder) == f"pf2lora: {folder}: a folder, not a config file"


@pytest.mark.parametrize(("number", "column"), [(16, "text"), (17, "label")])
def test_16_and_17_a_lone_surrogate(
    world: World, tmp_path: Path, refused: Command, number: int, column: str
) -> None:
    rows = [dict(row) for row in sentences(30, 0)]
    rows[3][column] = "half \ud83d of a pair"
    file = write_jsonl(tmp_path / "north.jsonl", rows)
    for args in (
        ["train", "--model", world.model, "--clients", file, "--out", tmp_path / "run"],
        ["data", "show", "--clients", file],
    ):
        line = refused(*args)
        assert f"{file}, line 4" in line and "half of a surrogate pair" in line
    assert list(tmp_path.iterdir()) == [file]


def test_16_a_lone_surrogate_on_the_command_line(run: Path, refused: Command) -> None:
    assert "half of a surrogate pair" in refused("predict", run, "half \udcff of a pair")
    assert "half of a surrogate pair" in refused(
        "train", "--title", "\udcff", "--model", "m", "--clients", "a"
    )


def test_18_json_nested_too_deep(world: World, run: Path, tmp_path: Path, refused: Command) -> None:
    for depth in (65, 3_000, 100_000):
        nest = "[" * depth + "]" * depth
        lines, whole = tmp_path / "a.jsonl", tmp_path / "b.json"
        lines.write_text(json.dumps({"text": "a", "label": "b"}) + f'\n{{"text": {nest}}}\n')
        whole.write_text(nest)
        assert f"{lines}, line 2: broken JSON (nested more than 64 deep)" in refused(
            "data", "show", "--clients", lines
        )
        assert "nested more than 64 deep" in refused("data", "show", "--clients", whole)
        assert "nested more than 64 deep" in refused("report", whole)
        assert "nested more than 64 deep" in refused(
            "score", "squad", "--data", whole, "--predictions", whole
        )
        config = tmp_path / "c.toml"
        config.write_text(f"a = {nest}\n")
        assert "nested more than 64 deep" in refused("train", config)


# --- silently accepted, once -------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_out(world: World, run: Path, refused: Command, empty: str, tmp_path: Path) -> None:
    for args in (
        ["train", *world.base, "--out", empty],
        ["compare", *world.base, "--out", empty],
        ["export", run, "--out", empty],
        ["report", run, "--out", empty],
        ["data", "show", "--clients", *world.clients, "--figure", empty],
        ["reproduce", "synthetic", "--out", empty],
        ["demo", "--out", empty],
    ):
        assert "an empty name" in refused(*args)


def test_an_empty_out_from_python(world: World) -> None:
    from pf2lora import federate
    from pf2lora.errors import UserError

    with pytest.raises(UserError, match="out is empty"):
        federate(**world.settings(out=""))


def test_an_out_that_is_a_folder_of_data(world: World, refused: Command) -> None:
    folder = world.clients[0].parent
    before = contents(folder)
    for more in ([], ["--force"]):
        line = refused("train", *world.base, "--out", folder, *more)
        assert "holds data (north.jsonl)" in line and str(folder / "run") in line
    assert contents(folder) == before
