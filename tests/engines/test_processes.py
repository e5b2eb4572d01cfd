"""Several processes that share the clients: the same numbers as one, for every method."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from alternating import Alternating
from several_processes import in_processes, started
from tiny import SETTINGS, Problem, RegressionSource, build, regression_problem

from pf2lora.core.method import Method, take
from pf2lora.core.privacy import Mechanism
from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.engines.processes import ALONE, Processes, ProcessLost
from pf2lora.engines.share import Share, shared_out
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.local import Local

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

SIZES = (7, 12, 3, 9, 5)
OWN_RANKS: dict[str, Any] = {"ranks": (1, 3, 4, 2, 4)}
SCHEDULES = {
    "all": Schedule(rounds=3, steps=2),
    "some": Schedule(rounds=4, steps=1, participation=0.3, weighting="size", clients_per_pass=1),
}


def method_of(setting: str, p: Problem) -> Method:
    if setting == "alternating":
        return Alternating(p.layout, clients=len(SIZES))
    own = OWN_RANKS if "ranks" in SETTINGS[setting][1] else {}
    return build(setting, p, **own | ({"clients": len(SIZES)} if setting == "scaffold" else {}))


def rounds_of(p: Problem, method: Method, schedule: Schedule, share: Share | None = None) -> list[Round]:
    """The rounds of all clients, or of those that this process has."""
    state, source = method.init(p.x, p.y), p.source
    if share is not None:
        assert isinstance(source, RegressionSource)
        state = take(state, share.here)
        parts = (source.inputs, source.targets, source.names)
        source = RegressionSource(*([part[k] for k in share.here] for part in parts))  # type: ignore[arg-type]
    return [done.kept() for done in train(method, p.F, state, source, schedule, share=share)]


def share_of(processes: Processes) -> Share:
    return Share(processes, shared_out(SIZES, processes.size))


def assert_same(shared: list[list[Round]], alone: list[Round], owned: tuple[tuple[int, ...], ...]) -> None:
    """Up to the order of summation, in float64; what is common has the same bits in all processes."""
    for done in zip(*shared):
        assert all(torch.equal(other.common, done[0].common) for other in done)
    for own, here in zip(shared, owned, strict=True):
        for a, b in zip(own, alone, strict=True):
            assert (a.number, a.participants, a.left_out) == (b.number, b.participants, b.left_out)
            assert a.after.steps_done == b.after.steps_done
            torch.testing.assert_close(
                (a.stats.loss, a.common, a.before, a.served, a.after.servers, a.after.largest),
                (
                    *(b.stats.loss, b.common, take(b.before, here), take(b.served, here), b.after.servers),
                    b.after.largest,
                ),
                rtol=1e-8,
                atol=1e-10,
                equal_nan=True,
            )


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_method_gets_the_numbers_of_one_process(size: int) -> None:
    """With all clients in every round, and with so few that a process may have none of them."""
    p = regression_problem(SIZES)
    settings = [*SETTINGS, "alternating"]

    def work(processes: Processes) -> dict[Any, list[Round]]:
        return {
            (setting, name): rounds_of(p, method_of(setting, p), schedule, share_of(processes))
            for setting in settings
            for name, schedule in SCHEDULES.items()
        }

    found = in_processes(size, work)
    for setting in settings:
        for name, schedule in SCHEDULES.items():
            alone = rounds_of(p, method_of(setting, p), schedule)
            assert_same([part[setting, name] for part in found], alone, shared_out(SIZES, size))


# --- what concerns all -------------------------------------------------------------------------------------


def spoilt(p: Problem, factors: dict[int, float]) -> Problem:
    """Some clients' targets, multiplied."""
    assert isinstance(p.source, RegressionSource)
    targets = [factors.get(k, 1.0) * rows for k, rows in enumerate(p.source.targets)]
    return p._replace(source=replace(p.source, targets=targets))


def test_bad_clients_of_any_process_are_left_out_by_all() -> None:
    """One whose loss is no number, and one whose first update is far above the median of everybody's."""
    p = spoilt(regression_problem(SIZES), {1: torch.nan, 2: 1e6})
    method = HomLoRA(p.layout, lr=0.01, optimizer="sgd")
    found = in_processes(2, lambda processes: rounds_of(p, method, SCHEDULES["all"], share_of(processes)))
    alone = rounds_of(p, method, SCHEDULES["all"])
    assert list(alone[0].left_out) == [1, 2]
    assert_same(found, alone, shared_out(SIZES, 2))


def test_a_run_that_diverges_does_so_in_every_process() -> None:
    p = spoilt(regression_problem(SIZES), {0: torch.nan, 1: torch.nan, 2: torch.nan})

    def work(processes: Processes) -> str:
        with pytest.raises(Diverged) as error:
            rounds_of(p, HomLoRA(p.layout), SCHEDULES["all"], share_of(processes))
        return str(error.value)

    one, other = in_processes(2, work)
    assert one == other and "client 'client-0' is bad in round 1" in one and "2 more of 5 clients" in one


def test_noise_is_added_once() -> None:
    """A seed's is that of one process; the operating system's is the same for all processes."""
    p = regression_problem(SIZES)
    seeded = replace(SCHEDULES["some"], privacy=Mechanism(0.1, 0.5, seed=3), weighting="uniform")
    unseeded = replace(seeded, privacy=Mechanism(0.1, 0.5))
    method = HomLoRA(p.layout)

    def work(processes: Processes) -> list[list[Round]]:
        return [rounds_of(p, method, schedule, share_of(processes)) for schedule in (seeded, unseeded)]

    found = in_processes(2, work)
    assert_same([part[0] for part in found], rounds_of(p, method, seeded), shared_out(SIZES, 2))
    for one, other in zip(found[0][1], found[1][1]):
        assert torch.equal(one.common, other.common)
    assert not torch.allclose(found[0][1][0].common, found[0][0][0].common)


def test_one_learner_on_everybodys_data_is_trained_once() -> None:
    """By the first process; the others have its state after every round."""
    p = regression_problem((12,))
    method = Local(p.layout)
    steps: list[Any] = []

    def work(processes: Processes) -> tuple[list[Round], int]:
        share = Share(processes, ((0,), (0,))).of_copies()
        state = method.init(p.x, p.y)
        how: Any = {"share": share, "on_step": steps.append}
        done = [r.kept() for r in train(method, p.F, state, p.source, SCHEDULES["all"], **how)]
        return done, len(steps)

    (one, trained), (other, waited) = in_processes(2, work)
    assert (trained, waited) == (6, 0)
    alone = rounds_of(p, method, SCHEDULES["all"])
    for a, b, c in zip(one, other, alone):
        for found in (a, b):
            torch.testing.assert_close(
                (found.served, found.stats.loss), (c.served, c.stats.loss), rtol=0, atol=0
            )


# --- what processes tell each other ------------------------------------------------------------------------


def test_values_bytes_and_tensors_travel() -> None:
    def work(processes: Processes) -> Any:
        mine = torch.arange(processes.rank + 1, dtype=torch.float32).view(-1, 1)
        gathered = processes.gather(
            {"rank": processes.rank, "odd": [0.1, float("inf"), None, "é" * processes.rank]}
        )
        rows = [t.flatten().tolist() for t in processes.rows(mine, [1, 2])]
        copied = torch.full((2, 2), float(processes.rank)).mT
        processes.copy_first(copied)
        sent = processes.to_first(1, mine if processes.rank == 1 else None)
        at_first = None if sent is None else sent.tolist()
        return (
            gathered,
            rows,
            copied.sum().item(),
            at_first,
            processes.from_first(lambda: {"a": processes.rank}),
        )

    one, other = in_processes(2, work)
    told = [{"rank": r, "odd": [0.1, float("inf"), None, "é" * r]} for r in (0, 1)]
    assert one == (told, [[0.0], [0.0, 1.0]], 0.0, [[0.0], [1.0]], {"a": 0})
    assert other == (told, [[0.0], [0.0, 1.0]], 0.0, None, {"a": 0})


def test_what_fails_in_one_process_fails_in_all() -> None:
    """As what it is where a run does something about it; as a line that names the process, else."""
    errors = (UserError("no such file"), torch.OutOfMemoryError("full"), KeyError("bug"))

    def work(processes: Processes) -> list[str]:
        def fail(error: Exception) -> None:
            with processes.together():
                if processes.rank == 1:
                    raise error

        found = []
        for error in errors:
            with pytest.raises(type(error) if processes.rank == 1 else (UserError, RuntimeError)) as caught:
                fail(error)
            found.append(f"{caught.type.__name__}: {caught.value}")
        return found

    assert in_processes(2, work) == [
        ["UserError: no such file", "OutOfMemoryError: full", "UserError: process 1 failed: KeyError: 'bug'"],
        ["UserError: no such file", "OutOfMemoryError: full", "KeyError: 'bug'"],
    ]


def test_a_process_that_ends_is_noticed() -> None:
    def work(processes: Processes) -> str:
        if processes.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ProcessLost, match="another process of the run has ended") as lost:
            processes.gather(1)
        return str(lost.value)

    codes, (line, _) = started(2, work)
    assert codes[1] == -signal.SIGKILL and "\n" not in line


def test_one_process_alone_tells_nobody() -> None:
    assert ALONE.gather("a") == ["a"] and ALONE.from_first(lambda: 3) == 3
    tensor = torch.ones(2)
    assert ALONE.total(tensor) is tensor and ALONE.rows(tensor, [2]) == [tensor]


def test_clients_are_shared_out_by_their_loads() -> None:
    assert shared_out([1, 8, 2, 5, 4], 2) == ((1, 2), (0, 3, 4))
    assert shared_out([1, 1, 1], 3) == ((0,), (1,), (2,))
    loads = [float(1 + k * 7 % 13) for k in range(40)]
    totals = [sum(loads[k] for k in own) for own in shared_out(loads, 8)]
    assert max(totals) / min(totals) < 1.1
