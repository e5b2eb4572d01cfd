"""What a run shows while it goes on: one screen on a terminal, lines elsewhere, events as JSON and for callbacks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from little_world import FAST, World, command_line, make_world
from terminal import on_a_terminal, plain

import pf2lora
from pf2lora.run import plain_log
from pf2lora.run.events import (
    Event,
    MethodEnded,
    MethodStarted,
    Note,
    Progress,
    RoundEnded,
    RunEnded,
    RunStarted,
)
from pf2lora.run.progress import shown
from pf2lora.run.result import RoundRecord
from pf2lora.run.screen import Screen
from pf2lora.run.status import Status
from pf2lora.tasks.settings import Metric

ACCURACY = Metric("accuracy")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


# --- where a run stands ------------------------------------------------------------------------------------


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def started(**work: float) -> RunStarted:
    labels = {name: name.upper() for name in work}
    return RunStarted(labels, ["north", "west"], 10, 1, "model", "cpu", {"accuracy": ACCURACY}, work)


def told(status: Status, clock: Hand, *steps: tuple[float, Event]) -> None:
    for seconds, event in steps:
        clock.now += seconds
        status.take(event)


def test_time_left_is_that_of_the_rows_that_are_left() -> None:
    clock = Hand()
    status = Status(clock)
    told(status, clock, (0, started(a=100, b=300)), (0, MethodStarted("a", [0])))
    assert status.seconds_left is None and status.seconds_left_of_all is None
    assert status.share == 0
    told(status, clock, (10, Progress("a", 2, 0.25, 8)))
    assert status.seconds_left == pytest.approx(30)
    assert status.seconds_left_of_all == pytest.approx(30 + 300 * 10 / 25)
    assert status.steps_per_second == pytest.approx(0.8)
    clock.now += 5  # nothing is heard, and time goes on
    assert status.seconds_left == pytest.approx(25)
    told(status, clock, (5, Progress("a", 2, 0.5, 8, evaluating=True)))
    assert status.steps_per_second == pytest.approx(0.8)  # evaluating does no steps
    assert status.share == 0.5 and status.share_of_all == pytest.approx(50 / 400)
    assert status.which == "A, method 1 of 2" and status.where == "round 2 of 10, evaluating"
    told(status, clock, (20, MethodEnded("a")), (0, MethodStarted("b", [0])))
    assert status.share_of_all == pytest.approx(100 / 400) and status.number == 2
    assert status.seconds_left == pytest.approx(300 * 40 / 100)  # by the method before


def test_before_any_method_the_untrained_model_is_measured() -> None:
    clock = Hand()
    status = Status(clock)
    told(status, clock, (0, started(a=100)), (5, Progress("", 0, 0.25, 0, evaluating=True)))
    assert f"{status.which}: {status.where}" == "before training: the untrained model is measured, 25%"
    assert status.seconds_left is None and status.share_of_all == 0
    told(status, clock, (5, MethodStarted("a", [0])), (10, Progress("a", 1, 0.5, 4)))
    assert status.seconds_left == pytest.approx(10)  # what was before does not count


def test_a_run_that_goes_on_counts_the_time_of_what_it_does_itself() -> None:
    clock = Hand()
    status = Status(clock)
    told(status, clock, (0, started(a=100)), (0, MethodStarted("a", [0])))
    told(status, clock, (1, Progress("a", 6, 0.5, 0)), (10, Progress("a", 7, 0.75, 8)))
    assert status.seconds_left == pytest.approx(10)


def test_scores_are_means_over_seeds_and_name_the_worst_client() -> None:
    clock = Hand()
    status = Status(clock)
    told(status, clock, (0, started(a=100)), (0, MethodStarted("a", [0, 1])))
    for seed, west in ((0, 0.25), (1, 0.75)):
        record = RoundRecord(3, 0.1, [0.5, None], served={"accuracy": [0.75, west]})
        status.take(RoundEnded("a", seed, record))
    assert status.scores is not None and status.loss == 0.5
    assert (status.scores.text, status.scores.worst_text) == ("accuracy 62.50", "west 50.00")
    status.take(RoundEnded("a", 0, RoundRecord(4, 0.1, [0.25, 0.25])))
    assert status.loss == 0.25 and status.scores.round == 3  # the last that there are


# --- on a terminal -----------------------------------------------------------------------------------------


def test_one_screen_on_a_terminal(world: World, tmp_path: Path) -> None:
    args = [
        "compare",
        *world.base,
        "--method",
        "pf2lora",
        "homlora",
        "--rounds",
        "6",
        "--out",
        tmp_path / "run",
    ]
    code, written = on_a_terminal(args, width=90, OMP_NUM_THREADS="1")
    text = plain(written)
    assert code == 0, text
    for said in ("PF2LoRA, method 1 of 2: round ", "HOMLoRA, method 2 of 2", " of 6", "all methods", " left"):
        assert said in text, said
    assert re.search(
        r"loss \d\.\d{3} · accuracy \d+\.\d\d after round \d · worst client: (north|south|west) ", text
    )
    assert re.search(r"PF2LoRA: accuracy .*, in \d+ s", text)
    drawn = [line for line in text.splitlines() if "━" in line or " · " in line or "method 1" in line]
    assert drawn and max(map(len, drawn)) <= 90
    end = text.rsplit("method 2 of 2", 1)[1]
    assert end.count("accuracy in % over clients") == 1 and "\x1b[?25h" in written  # the cursor is back


def test_no_screen_where_none_can_be_drawn(monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for terminal, kind in (("xterm", Screen), ("dumb", plain_log.Lines)):
        monkeypatch.setenv("TERM", terminal)
        with shown() as listener:
            assert isinstance(listener, kind)


# --- lines and JSON ----------------------------------------------------------------------------------------


def test_plain_lines_come_now_and_then(capsys: Any) -> None:
    clock = Hand()
    notes: list[str] = []
    lines = plain_log.Lines(notes.append, clock)
    record = RoundRecord(2, 0.1, [0.5, 0.25], served={"accuracy": [0.75, 0.25]})
    for seconds, event in (
        (0, started(a=100, b=100)),
        (0, MethodStarted("a", [0])),
        (10, Progress("a", 2, 0.1, 4)),
        (0, RoundEnded("a", 0, record)),
        (0, Note("a note")),
        (6, Progress("a", 3, 0.2, 8)),
        (6, Progress("a", 3, 0.3, 12)),
        (60, MethodEnded("a")),
        (0, RunEnded(None)),  # type: ignore[arg-type]
    ):
        clock.now += seconds
        lines(event)
    said = capsys.readouterr().err.splitlines()
    assert notes == ["a note"]
    assert said == [
        "A, method 1 of 2: round 3 of 10, 0.5 steps/s, loss 0.375, accuracy 50.00 after round 2 (worst client: west "
        "25.00), 64 s left, of all methods 2 min 24 s left",
        "A: accuracy 50.00 as served, worst client: west 25.00, in 82 s",
    ]


def test_json_is_all_that_standard_output_gets(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    args = [
        "compare",
        *world.base,
        "--method",
        "homlora",
        "local",
        "--out",
        tmp_path / "run",
        "--log",
        "json",
    ]
    code, out, err = command_line(monkeypatch, capsys, *args)
    assert (code, err) == (0, "")
    found = [json.loads(line) for line in out.splitlines()]
    names = [event["event"] for event in found if event["event"] not in ("note", "progress")]
    rounds = ["round_ended"] * FAST["rounds"]
    once = ["method_started", *rounds, "method_ended"]
    assert names == ["run_started", *once, *once, "run_ended"]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told_rounds = [event for event in found if event["event"] == "round_ended"]
    assert [{**e, "time": 0} for e in metrics] == [
        {"time": 0} | {k: v for k, v in e.items() if k not in ("event", "time")} for e in told_rounds
    ]
    result = pf2lora.load_result(tmp_path / "run")
    assert found[-1]["methods"]["homlora"]["mean"] == result.served(method="homlora").mean
    assert found[0]["clients"] == ["north", "south", "west"]


def test_progress_in_a_log_is_rare_and_says_what_is_left() -> None:
    clock, file = Hand(), io.StringIO()
    log = plain_log.JsonLog(file, clock)
    for seconds, event in (
        (0, started(a=100)),
        (0, MethodStarted("a", [0])),
        (1, Progress("a", 1, 0.1, 4)),
        (1, Progress("a", 1, 0.2, 8)),
        (8, Progress("a", 1, 0.5, 20)),
    ):
        clock.now += seconds
        log(event)
    (line,) = [e for e in map(json.loads, file.getvalue().splitlines()) if e["event"] == "progress"]
    assert (line["share"], line["seconds_left"], line["steps_per_second"]) == (0.5, 10.0, 2.0)


def test_an_unknown_log_is_refused_before_anything_is_loaded(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    args = ["train", *world.base, "--out", tmp_path / "run", "--log", "jsn"]
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "did you mean 'json'" in err and not (tmp_path / "run").exists()


# --- from Python -------------------------------------------------------------------------------------------


def test_callbacks_hear_everything_in_order(world: World, capfd: Any) -> None:
    heard: list[Event] = []
    result = pf2lora.federate(**world.settings(method=["homlora", "pf2lora"]), callbacks=[heard.append])
    out, err = capfd.readouterr()
    assert out == "" and "LOAD REPORT" not in err and "Loading weights" not in err
    first = [
        e for e in heard if isinstance(e, Progress) and not e.method
    ]  # the untrained model, before any method
    assert first[-1].done == 1
    kinds = [type(event) for event in heard if not isinstance(event, Note) and event not in first]
    assert kinds[:2] == [RunStarted, MethodStarted] and kinds[-2:] == [MethodEnded, RunEnded]
    assert isinstance(heard[-1], RunEnded) and heard[-1].result == result
    for method in ("homlora", "pf2lora"):
        moved = [e for e in heard if isinstance(e, Progress) and e.method == method]
        shares = [event.done for event in moved]
        assert shares == sorted(shares) and shares[-1] <= 1 and shares[-1] > 0.8
        assert moved[-1].steps == FAST["rounds"] * FAST["steps"] * 3
        assert any(event.evaluating for event in moved)  # evaluation moves the bar, too
        records = [e.record for e in heard if isinstance(e, RoundEnded) and e.method == method]
        assert records == result.methods[method].runs[0].rounds


def test_a_callback_that_fails_fails_the_run(world: World) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, RoundEnded):
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        pf2lora.federate(**world.settings(), callbacks=[stop], log="none")


def test_what_is_before_averaging_can_be_left_out(world: World) -> None:
    both = pf2lora.federate(**world.settings(method="homlora"))
    served = pf2lora.federate(**world.settings(method="homlora", evaluate_before=False))
    assert served.served() == both.served()
    (run,) = served.methods["homlora"].runs
    assert run.before_averaging is None and all(r.before_averaging is None for r in run.rounds)
    validated = pf2lora.federate(
        **world.settings(method="homlora", evaluate_before=False, validation_ratio=0.2)
    )
    (run,) = validated.methods["homlora"].runs  # a client may choose it, so it is measured in the end
    assert run.before_averaging is not None and run.rounds[0].before_averaging is None
