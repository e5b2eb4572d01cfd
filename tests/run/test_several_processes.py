"""Whole runs that several processes share: the results, the files, checkpoints, and the command line's one voice."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from broken_runs import clocks_standing_still, contents, same, unbroken
from little_world import World, flags, make_world
from several_processes import assert_same, in_processes, launched, started
from tiny_tasks import write_generation_task, write_question_task

import pf2lora
from pf2lora import cli
from pf2lora.engines.processes import Processes
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import cadence, launch
from pf2lora.run.interruption import Interrupted
from pf2lora.run.result import Result, load_result
from pf2lora.run.watched import Watched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "steps": 2,
    "lr": 1e-3,
    "evaluate_every": 1,
    "validation_ratio": 0.3,
    "client_lr": "auto",
    "personal_steps": 2,
    "checkpoint_every": 1,
    "log": "none",
}
SHORT: dict[str, Any] = {
    "method": "pf2lora",
    "rounds": 2,
    "steps": 2,
    "batch_size": 4,
    "rank": 4,
    "client_lr": 0.1,
    "validation_ratio": 0.3,
    "personal_steps": 0,
    "device": "cpu",
    "log": "none",
}
QUICK = ("pf2lora", "hetlora", "centralized")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def compared(world: World, out: Path, size: int, methods: Sequence[str], **changes: Any) -> list[Result]:
    """The results of all processes; they wrote one folder."""
    settings = world.settings(**SETTINGS | changes, method=list(methods), out=str(out))
    return in_processes(size, lambda processes: pf2lora.federate(**settings))


@pytest.mark.parametrize(
    ("size", "methods"),
    [(2, QUICK), pytest.param(3, tuple(METHODS.own), marks=pytest.mark.slow)],
    ids=["quick", "all methods"],
)
def test_a_run_of_several_processes_is_that_of_one(
    size: int, methods: tuple[str, ...], world: World, tmp_path: Path, resized: list[bool]
) -> None:
    """Its figures, with two seeds side by side, and its files: adapters of every client, result, report."""
    found = compared(world, tmp_path / "shared", size, methods, seeds=2, rounds=2)
    settings = world.settings(**SETTINGS | {"rounds": 2}, method=list(methods), seeds=2)
    alone = pf2lora.federate(**settings, out=str(tmp_path / "alone"))
    assert any(resized)
    for result in found:
        assert_same(result, alone)
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    assert load_result(tmp_path / "shared").machine["processes"] == size
    assert "processes" not in alone.machine


@pytest.mark.parametrize(
    ("task", "write", "own"),
    [
        ("question-answering", write_question_task, {"max_length": 64, "stride": 8}),
        pytest.param("generation", write_generation_task, {"max_length": 64}, marks=pytest.mark.slow),
    ],
    ids=["question-answering", "generation"],
)
def test_other_tasks_are_shared_too(
    task: str, write: Callable[..., tuple[Path, list[Path]]], own: dict[str, Any], tmp_path: Path
) -> None:
    """Their rows are examples of several kinds, of which each process sees its own clients'."""
    model, clients = write(tmp_path, ["north", "south", "west"])
    settings = SHORT | own | {"task": task, "model": str(model), "clients": [str(path) for path in clients]}
    found = in_processes(2, lambda processes: pf2lora.federate(**settings))
    alone = pf2lora.federate(**settings)
    for result in found:
        assert_same(result, alone)
        assert [(e.client, e.prompt) for e in result.examples] == [
            (e.client, e.prompt) for e in alone.examples
        ]


def test_all_processes_evaluate_after_the_same_rounds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the whole run's rows: by its own, the process with the largest client would evaluate once."""
    monkeypatch.setattr(cadence, "FEW_ROWS", 10)
    settings = world.settings(rounds=6, steps=2, method=["homlora"], log="none")
    found = in_processes(2, lambda processes: pf2lora.federate(**settings))
    for result in [*found, pf2lora.federate(**settings)]:
        (run,) = result.methods["homlora"].runs
        assert [r.round for r in run.rounds if r.served is not None] == [3, 6]


def test_a_method_that_diverges_leaves_the_others(world: World, tmp_path: Path) -> None:
    """In every process alike."""
    rates = {"homlora": {"lr": 1e30, "optimizer": "sgd"}}
    settings = world.settings(**SETTINGS, method=["homlora", "local"], methods=rates)
    found = in_processes(2, lambda processes: pf2lora.federate(**settings, out=str(tmp_path / "run")))
    for result in found:
        assert list(result.failed) == ["homlora"] and result.methods["local"].runs
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_more_processes_than_clients(world: World, tmp_path: Path) -> None:
    """Those left over end at once, and well; the others say so."""
    settings = world.settings(**SETTINGS, method="homlora", out=str(tmp_path / "run"))
    codes, found = started(4, lambda processes: pf2lora.federate(**settings))
    assert codes == [0] * 4 and found[3] is None  # world has three clients
    line = "4 processes share 3 clients: 1 have nothing to do"
    assert all(line in result.methods["homlora"].runs[0].warnings for result in found[:3])


def stopped_in_round(number: int, processes: Processes, settings: dict[str, Any]) -> str:
    """A run whose last process, and no other, is asked to stop."""
    original, seen = Watched.note, 0

    def noted(self: Watched, *args: Any) -> None:
        nonlocal seen
        original(self, *args)
        seen += 1
        if seen == number and processes.rank == processes.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(Watched, "note", noted), pytest.raises(Interrupted) as stop:
        pf2lora.federate(**settings)
    return str(stop.value)


@pytest.mark.parametrize("method", ["pf2lora", "centralized"])
@pytest.mark.usefixtures("sized_every_round")
def test_a_run_goes_on_with_another_number_of_processes(method: str, world: World, tmp_path: Path) -> None:
    """Two, then three, then one: all stop after the round in which one of them was asked to."""
    settings = world.settings(**SETTINGS | {"rounds": 4}, method=method)
    alone = pf2lora.federate(**settings, out=str(tmp_path / "alone"))
    here = settings | {"out": str(tmp_path / "run"), "resume": True}
    for size, rounds, reached in ((2, 1, 1), (3, 2, 3)):
        lines = in_processes(size, lambda processes: stopped_in_round(rounds, processes, here))  # noqa: B023
        assert all(f"stopped after round {reached}, which is kept" in line for line in lines)
    told: list[Any] = []
    result = pf2lora.federate(**here, callbacks=[told.append])
    assert "going on: processes were 3 and are 1: same up to rounding" in [
        getattr(e, "line", "") for e in told
    ]
    assert_same(result, alone)
    assert files(tmp_path / "run") == files(tmp_path / "alone")


# --- the command line --------------------------------------------------------------------------------------


def command(rank: int, *args: object, place: Path) -> None:
    """`pf2lora ARGS…` as one of torchrun's processes; what it says is in files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = (place / f"{name}-{rank}").open("w")
        os.dup2(file.fileno(), number)
        setattr(sys, name, file)
    with patch("sys.argv", ["pf2lora", *map(str, args)]):
        cli.main()


def said(place: Path, size: int) -> list[tuple[str, str]]:
    return [((place / f"stdout-{r}").read_text(), (place / f"stderr-{r}").read_text()) for r in range(size)]


def words(world: World, out: Path) -> list[str]:
    settings = {k: v for k, v in SETTINGS.items() if k not in ("validation_ratio", "personal_steps")}
    return ["train", *world.base, *flags(settings | {"out": str(out), "log": "lines"}), "--method", "homlora"]


def test_the_first_process_speaks_and_writes(world: World, tmp_path: Path) -> None:
    args = words(world, tmp_path / "run")
    codes, _ = launched(2, lambda rank: command(rank, *args, place=tmp_path))
    first, second = said(tmp_path, 2)
    assert codes == [0, 0], (first, second)
    assert "Use it:" in first[0] and second == ("", "")
    assert load_result(tmp_path / "run").machine["processes"] == 2
    assert launched(2, lambda rank: command(rank, *args, "--resume", place=tmp_path))[0] == [0, 0]
    assert "nothing is left to do" in "".join(said(tmp_path, 2)[0])


def test_a_launched_process_alone_is_one_that_nobody_launched(world: World, tmp_path: Path) -> None:
    """As `torchrun --nproc-per-node 1`: every file of the run folder to the last byte, also where a server sees the
    rows that were sent or keeps something."""
    out = tmp_path / "run"
    methods = {"method": ["pf2lora", "hetlora", "scaffold"], "client_lr": "auto"}
    settings = world.settings(**SETTINGS | methods)

    def work(rank: int) -> bool:
        pf2lora.federate(**settings, out=out)
        return all(name in os.environ for name in launch.LAUNCHED)

    with clocks_standing_still():
        expected = unbroken(out, settings)
        codes, were_launched = launched(1, work)
    assert codes == [0] and were_launched == [True]
    same(contents(out), expected)
    assert {"result.json", "metrics.jsonl"} < expected.keys()


def test_bad_input_is_one_line_from_one_process(world: World, tmp_path: Path) -> None:
    """Whoever finds it: all, before they have met; the first alone; another one alone, in what it does by itself."""
    out = tmp_path / "run"
    (out / "state").mkdir(parents=True)
    (out / "config.toml").write_text("")
    cases: list[tuple[list[str], str]] = [
        ([*words(world, out), "--rounds", "0"], "rounds is 0"),
        (words(world, out), "holds another run (config.toml)"),
        ([*words(world, tmp_path / "new"), "--device", "cuda:1"], "2 processes would all take it"),
        (["sweep", *words(world, out)[1:]], "pf2lora sweep runs in one process: torchrun shares the clients"),
        ([*words(world, out), "--dry-run"], "a dry run runs in one process"),
        (["federation", "join", "kit"], "a site starts others by itself (processes in its site.toml)"),
    ]
    for number, (args, line) in enumerate(cases):
        place = tmp_path / str(number)
        place.mkdir()
        codes, _ = launched(2, lambda rank: command(rank, *args, place=place))  # noqa: B023
        spoken = "".join(out + err for out, err in said(place, 2))
        assert codes == [2, 2] and spoken.count("\n") == 1 and line in spoken, spoken
    with patch("pf2lora.run.workload.check_lengths", failing_second):
        codes, _ = launched(2, lambda rank: command(rank, *words(world, tmp_path / "new"), place=tmp_path))
    assert codes == [2, 2] and [err for _, err in said(tmp_path, 2)] == ["pf2lora: too long here\n", ""]


@pytest.mark.parametrize("wrong", [(0, 1), (1,)])
def test_of_several_machines_one_process_says_what_is_wrong(wrong: tuple[int, ...], tmp_path: Path) -> None:
    """Before they have met, each the first of its machine; there may be one alone that finds it."""

    def work(rank: int) -> None:
        if rank in wrong:
            command(rank, "train", "nowhere.toml", place=tmp_path)

    assert launched(2, work, nodes=True)[0] == [2 if rank in wrong else 0 for rank in range(2)]
    spoken = [(tmp_path / f"stderr-{rank}").read_text() for rank in wrong]
    assert spoken == ["pf2lora: nowhere.toml: no such config file\n", ""][: len(wrong)]


def failing_second(*args: Any) -> None:
    if os.environ["RANK"] == "1":
        raise UserError("too long here")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_run_with_one_line(killed: int, world: World, tmp_path: Path) -> None:
    """It says what is kept, and the command that is in it goes on, here with one process."""
    out = tmp_path / "run"

    def work(rank: int) -> None:
        original, seen = Watched.note, 0

        def noted(self: Watched, *args: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == 2 and rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, *args)

        with patch.object(Watched, "note", noted):
            command(rank, *words(world, out), place=tmp_path)

    codes, _ = launched(2, work)
    assert codes == [2 - 11 * (killed == 0), 2 - 11 * (killed == 1)]
    err = said(tmp_path, 2)[1 - killed][1]
    line = err.splitlines()[-1]
    assert line.startswith("pf2lora: another process of the run has ended or does not answer")
    again = f"torchrun --nproc-per-node 2 -m pf2lora train {out}/config.toml --resume"
    assert line.endswith(f"; round 1 is kept; go on with: {again}"), err
    result = pf2lora.federate(**resumed(world, out))
    assert [r.round for r in result.methods["homlora"].runs[0].rounds] == [1, 2, 3]


def resumed(world: World, out: Path) -> dict[str, Any]:
    own = {"validation_ratio": 0, "personal_steps": None, "method": "homlora"}
    changes = SETTINGS | own | {"out": str(out), "resume": True}
    return world.settings(**changes)


def test_what_torchrun_says() -> None:
    """A process of torchrun's knows the place where all meet; other launchers' variables alone are none."""
    assert launch.launched({}) == launch.launched({"RANK": "0", "WORLD_SIZE": "4"}) == 1
    said = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launch.launched(said) == 4 and launch.command_prefix() == ""
    with patch.dict(os.environ, said | {"LOCAL_WORLD_SIZE": "2"}):
        assert launch.command_prefix() == "torchrun … -m "  # there is another machine
