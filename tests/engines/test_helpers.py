"""Processes that compute a client's batch together: the numbers of one, for every method, and nothing hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_helpers import helped
from tiny import SETTINGS, Problem, build, regression_problem, tiny_problem
from tiny_language_models import TASK, loss_and_gradients, two_level, whole
from torch import Tensor

from pf2lora.core.method import State, gradients, take, tensors_of, variable
from pf2lora.core.second_order import differentiable_twice
from pf2lora.engines.accumulation import Sums, mean_loss
from pf2lora.engines.batches import Batch
from pf2lora.engines.helpers import Computing, HelperLost, Helpers
from pf2lora.engines.steps import local_steps
from pf2lora.errors import UserError
from pf2lora.tasks.classification.task import Classification

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

TASK_OF_TINY = Classification(None, ["0", "1", "2"])  # type: ignore[arg-type]


def sums_of(p: Problem) -> Sums:
    """A problem's loss as a sum over rows, and their number."""

    def sums(x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = next(iter(batch.tensors.values())).shape[0] // batch.clients
        return p.F(x, y, batch) * rows, torch.full((batch.clients,), rows, dtype=x.dtype)

    return sums


def steps_of(p: Problem, setting: str, sums: Sums, helpers: Helpers | None, client: int = 1) -> State:
    """Some local steps of one client, as a site takes them."""
    method = build(setting, p)
    state = take(method.init(p.x, p.y), [client])
    (variant, *_) = method.variants_for_round(state, 1)

    def F(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return mean_loss(sums, x, y, batch, None, helpers)

    return local_steps(variant, F, state, p.source, clients=[client], first_step=[0], steps=3)[0]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_method_gets_the_numbers_of_one_process(processes: int) -> None:
    """Four rows over two and four processes; the fourth of four has none where a method takes two of them."""
    p = regression_problem()
    sums = sums_of(p)
    with helped(processes, sums, p.x[:1], p.y[:1]) as helpers:
        for setting in SETTINGS:
            alone, shared = (tensors_of(steps_of(p, setting, sums, who)) for who in (None, helpers))
            for ours, expected in zip(shared, alone, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12, msg=setting)


@pytest.mark.parametrize("rows", [None, 1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_of_a_model_and_their_dropout(dropout: float, rows: int | None) -> None:
    """Seven rows over three processes, of each of three clients; parts of a process's rows; fewer rows than
    processes. A row's dropout mask is what it has in the whole batch."""
    p = tiny_problem("roberta", batch=7, dropout=dropout)
    assert p.model is not None
    sums = partial(TASK_OF_TINY.loss_sums, p.model)

    def found(batch: Batch, helpers: Helpers | None) -> tuple[Tensor, ...]:
        x, y = variable(p.x), variable(p.y)
        loss = mean_loss(sums, x, y, batch, rows, helpers)
        return loss.detach(), *gradients(loss * torch.tensor([1.0, -2.0, 0.5]).to(loss), x, y)

    batch = p.source.draw([0, 1, 2], [1] * 3)
    with helped(3, sums, p.x, p.y) as helpers:
        for part in (batch, batch.parts(2)[0], batch.parts(1)[0]):
            for ours, expected in zip(found(part, helpers), found(part, None)):
                torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_targets_that_weigh_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's mean is over its tokens, wherever they were summed; layers that are run again are so everywhere."""
    model, x, y = two_level("gpt2")
    sums = partial(TASK.loss_sums, model)
    expected = loss_and_gradients(model, x, y, whole())

    def build(order: Any) -> Computing:
        return Computing(sums, torch.device("cpu"), model.repeat_layers)

    with helped(2, sums, x, y, build=build) as helpers:
        helpers.repeated = lambda: model.repeats_layers
        monkeypatch.setattr(TASK, "helpers", helpers)
        for repeated in (False, True):
            model.repeat_layers(repeated)
            for ours, full in zip(loss_and_gradients(model, x, y, whole()), expected):
                torch.testing.assert_close(ours, full, rtol=1e-9, atol=1e-12)


# --- what is computed where --------------------------------------------------------------------------------


class Counted:
    """Sums of `x · u`, which notes how many rows this process was given."""

    def __init__(self, fails: Callable[[Tensor], None] = lambda u: None) -> None:
        self.rows: list[int] = []
        self.fails = fails

    def __call__(self, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        u = batch.tensors["u"].view(batch.clients, -1)
        self.rows.append(u.shape[1])
        self.fails(u)
        return (x * u.sum(1, keepdim=True)).sum(1), torch.full((batch.clients,), float(u.shape[1]))


X, Y = torch.ones(1, 3), torch.zeros(1, 0)
FIVE = Batch(1, {"u": torch.arange(5.0)})


def test_each_process_has_its_own_rows() -> None:
    """The first has the largest share; alone it has all rows where a gradient is differentiated again."""
    sums = Counted()
    x = variable(X)
    with helped(2, sums, X, Y) as helpers:
        loss = mean_loss(sums, x, Y, FIVE, None, helpers)
        assert sums.rows == [3] and loss.tolist() == [6.0]
        assert gradients(loss, x)[0].tolist() == [[2.0] * 3]
        with torch.no_grad():
            assert mean_loss(sums, X, Y, FIVE, 2, helpers).tolist() == [6.0] and sums.rows == [3, 2, 1]
        sums.rows.clear()
        with differentiable_twice():
            assert mean_loss(sums, x, Y, FIVE, 2, helpers).tolist() == [6.0] and sums.rows == [5]


def test_the_same_bits_every_time() -> None:
    p = regression_problem()
    sums = sums_of(p)
    with helped(3, sums, p.x[:1], p.y[:1]) as helpers:
        one, other = (steps_of(p, "pf2lora-difference", sums, helpers) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(tensors_of(one), tensors_of(other), strict=True))


# --- what goes wrong ---------------------------------------------------------------------------------------


def test_a_helper_that_is_killed_is_one_line_and_started_again(tmp_path: Path) -> None:
    """While it waits, and while it computes."""
    first, died = os.getpid(), tmp_path / "died"

    def dies(u: Tensor) -> None:
        if os.getpid() != first and u[0, 0] == 2.0 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    sums = Counted(dies)
    with helped(3, sums, X, Y) as helpers:
        with pytest.raises(HelperLost, match=r"process 2 of the 3 .* has ended \(killed by signal 9\)"):
            mean_loss(sums, X, Y, FIVE, None, helpers)
        assert not helpers.running
        assert mean_loss(sums, X, Y, FIVE, None, helpers).tolist() == [6.0]
        helpers.running[1].process.kill()
        with pytest.raises(HelperLost, match="process 3 of the 3"):
            mean_loss(sums, X, Y, FIVE, None, helpers)
        assert mean_loss(sums, X, Y, FIVE, None, helpers).tolist() == [6.0]


def test_what_fails_in_one_process_fails_in_the_first_and_later_answers_are_right() -> None:
    """No memory at a helper is no memory here; so are others' errors, with the process's number."""
    first = os.getpid()
    error: dict[int, Exception] = {
        1: torch.OutOfMemoryError("full"),
        2: KeyError("bug"),
        3: torch.OutOfMemoryError("full here"),
    }

    def fails(u: Tensor) -> None:
        case = int(u[0, -1])
        if case in (1, 2) and os.getpid() != first:
            raise error[case]
        if case == 0 and os.getpid() == first and u[0, 0] == 3:
            raise error[3]

    def batch(*rows: float) -> Batch:
        return Batch(1, {"u": torch.tensor(rows)})

    sums = Counted(fails)
    with helped(2, sums, X, Y) as helpers:
        for rows, kind, line in (
            ((0.0, 0.0, 0.0, 1.0), torch.OutOfMemoryError, "full"),
            ((0.0, 0.0, 0.0, 2.0), UserError, "process 2 failed: KeyError: 'bug'"),
            ((3.0, 0.0, 0.0, 9.0), torch.OutOfMemoryError, "full here"),
        ):
            with pytest.raises(kind, match=line):
                mean_loss(sums, X, Y, batch(*rows), None, helpers)
            assert mean_loss(sums, X, Y, FIVE, None, helpers).tolist() == [6.0]


def test_a_helper_that_cannot_be_built_says_why() -> None:
    def build(order: Any) -> Computing:
        raise UserError("there is no such model")

    with helped(2, Counted(), X, Y, build=build) as helpers:
        with pytest.raises(UserError, match=r"^there is no such model$"):
            helpers.start()
        assert not helpers.running
