"""How often a run is evaluated where nobody says: as often as leaves nine tenths of an accelerator's time to training,
counted in rows by what each method says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from little_world import World, make_world

import pf2lora
from pf2lora.core.method import Method
from pf2lora.methods import METHODS, own_size
from pf2lora.run import cadence, trial
from pf2lora.run.cadence import Rows, most_evaluations, rounds_to_evaluate, rows_of, said_aloud
from pf2lora.run.config import from_settings
from pf2lora.run.result import RoundRecord
from pf2lora.run.set_up import set_up
from pf2lora.run.workload import Workload, load_workload

AUTO: dict[str, Any] = {"validation_ratio": 0.2, "client_lr": "auto"}
SMALL: dict[str, Any] = AUTO | {"rounds": 20, "steps": 1, "batch_size": 4, "test_ratio": 0.4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def workload_of(world: World, **changes: Any) -> Workload:
    return load_workload(from_settings(world.settings(**SMALL | changes)))


def sizes(workload: Workload) -> tuple[int, int]:
    return sum(len(c.test) for c in workload.clients), sum(len(c.validation) for c in workload.clients)


def test_rows_are_counted_by_what_a_method_says_of_itself(world: World) -> None:
    workload = workload_of(world, method=["homlora", "pf2lora", "local"])
    test, validation = sizes(workload)
    batch = len(workload.clients) * 4 * 3
    assert rows_of(workload, "homlora") == Rows(
        batch, 0, 2 * test + 2 * validation, 2 * test + 3 * validation, 3 * batch
    )
    # Three gradients a step; of them a twentieth for sizes, four to be served, and the common adapter to choose from.
    counted = rows_of(workload, "pf2lora")
    assert 3 * validation > 3 * batch / 20
    assert counted.resizing == pytest.approx(3 * batch / 20)
    assert counted._replace(resizing=0) == Rows(
        3 * batch, 0, 2 * test + 7 * validation, 3 * test + 3 * validation, 9 * batch
    )
    assert rows_of(workload, "local") == Rows(batch, 0, test + validation, 2 * test, 0)
    fixed = workload_of(world, method=["pf2lora"], client_lr=0.1, evaluate_before=False)
    assert rows_of(fixed, "pf2lora")[1:3] == (0, test + 3 * validation)
    assert rows_of(workload_of(world, validation_ratio=0), "pf2lora")[3:] == (0, 0)


def test_the_sample_that_is_asked_before_rounds_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cadence, "SAMPLE", 2)
    workload = workload_of(world, method=["pf2lora"], participation=0.4, steps=50)
    assert rows_of(workload, "pf2lora").resizing == 3 * 2 * 2  # of the two clients of three that take part


def test_the_count_is_what_a_run_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are judged and answered by a run of PF2LoRA with its own size, against the count."""
    workload = workload_of(
        world, method=["pf2lora"], rounds=4, evaluate_every=2, steps=100
    )  # sizes every round
    asked = {"judged": 0, "answered": 0}
    task = type(workload.task)
    losses, predict = task.losses, task.predict

    def judged(self: Any, model: Any, x: Any, y: Any, rows: Any, clients: Sequence[int]) -> Any:
        asked["judged"] += sum(rows.of(clients).sizes())
        return losses(self, model, x, y, rows, clients)

    def answered(self: Any, model: Any, x: Any, y: Any, rows: Any, **how: Any) -> Any:
        asked["answered"] += sum(rows.sizes())
        return predict(self, model, x, y, rows, **how)

    monkeypatch.setattr(task, "losses", judged)
    monkeypatch.setattr(task, "predict", answered)

    def choose(self: Any) -> None:  # something that was not measured anyway
        self.chosen.take_better(self.last["before_averaging"])

    monkeypatch.setattr(trial.Deployment, "choose", choose)
    one = set_up(workload, "pf2lora", 0)
    records: list[RoundRecord] = []
    trial.run(one, lambda seed, record: records.append(record))
    counted = rows_of(workload, "pf2lora")
    assert asked["judged"] + asked["answered"] == counted.asked(4, 2)
    one.model.remove()


ACCELERATOR = torch.device("cuda")


@pytest.mark.parametrize("rounds", [20, 50, 100, 400])
@pytest.mark.parametrize("method", ["homlora", "pf2lora"])
def test_what_is_asked_has_a_tenth_of_an_accelerators_time(
    world: World, method: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever thinning can achieve it: not where one evaluation takes more than that by itself."""
    monkeypatch.setattr(cadence, "FEW_ROWS", 10)
    for steps in (1, 2, 5, 20):
        workload = workload_of(world, method=[method], rounds=rounds, steps=steps)
        workload = replace(workload, device=ACCELERATOR)
        counted, times = rows_of(workload, method), len(rounds_to_evaluate(workload))
        achievable = counted.share(rounds, 1) <= 0.1
        assert (counted.share(rounds, times) <= 0.1) is achievable
        if achievable and times < 10:  # and no less often than that asks for
            assert counted.times(rounds, 0.1) == times or counted.share(rounds, times + 1) > 0.09
    assert achievable or method == "pf2lora"


def test_sizes_leave_something_to_evaluation() -> None:
    rows = Rows(steps=90, resizing=4.5, evaluation=100, end=0, alone=0)
    assert rows.times(100, 0.1) == 5 and rows._replace(resizing=0).times(100, 0.1) == 10
    assert rows._replace(evaluation=1e6).times(100, 0.1) == 1


def test_the_count_decides_how_often_a_run_is_evaluated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workload_of(world, method=["homlora"], validation_ratio=0, steps=2)
    test, _ = sizes(workload)
    monkeypatch.setattr(cadence, "FEW_ROWS", 2 * test + 1)
    assert most_evaluations(workload, 20) == 10 and said_aloud(workload) == workload.config
    monkeypatch.setattr(cadence, "FEW_ROWS", 10)
    trained = 20 * 2 * 3 * 4 * 3
    for device, parts in (
        (workload.device, 4),
        (ACCELERATOR, 9),
    ):  # one part in five on a CPU, in ten elsewhere
        there = replace(workload, device=device)
        assert most_evaluations(there, 20) == max(1, trained // parts // (2 * test))
    every = min(rounds_to_evaluate(workload))
    assert every > 2
    assert (
        said_aloud(workload).training.evaluate_every == every
    )  # for a rehearsal's server, which sees no rows
    both = replace(workload_of(world, method=["homlora", "local"], validation_ratio=0, steps=2))
    assert rounds_to_evaluate(both) == rounds_to_evaluate(workload)  # all methods alike, by the costliest


def test_resizing_has_seconds_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not the steps': a method that asks validation rows in every round does not look slower by it."""
    import time

    resize = METHODS["pf2lora"].resize

    def slow(self: Method, *args: Any, serving: bool = False, **options: Any) -> Any:
        time.sleep(0 if serving else 0.3)
        return resize(self, *args, serving=serving, **options)

    monkeypatch.setattr(METHODS["pf2lora"], "resize", slow)
    monkeypatch.setattr(own_size, "ASKED", Fraction(1, 1000))  # before every round
    settings = world.settings(method=["pf2lora", "homlora"], rounds=3, steps=1, **AUTO)
    result = pf2lora.federate(**settings)
    (run,), (other,) = (result.methods[name].runs for name in ("pf2lora", "homlora"))
    assert run.resize_seconds is not None and run.evaluation_seconds is not None
    assert 0.6 <= run.resize_seconds < run.evaluation_seconds  # not before the first round
    assert run.seconds < 0.6 and other.resize_seconds == 0
