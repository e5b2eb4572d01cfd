"""Choosing on few rows: the gain by hand, and what says nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pf2lora.core.choice import gain

NAN, INF = math.nan, math.inf


def rows(*of_clients: list[float]) -> Tensor:
    """(M, n), nan behind a client's last row."""
    longest = max(map(len, of_clients))
    return torch.tensor([own + [NAN] * (longest - len(own)) for own in of_clients], dtype=torch.float64)


def test_the_gain_by_hand() -> None:
    """Differences 1, 2, 3: their mean is 2, and its standard error 1/√3."""
    losses, others = rows([1.0, 1.0, 1.0]), rows([2.0, 3.0, 4.0])
    for caution in (0.0, 0.5, 1.0):
        assert gain(losses, others, caution).item() == pytest.approx(2 - caution / math.sqrt(3))
        assert gain(others, losses, caution).item() == pytest.approx(-2 - caution / math.sqrt(3))


def test_it_is_of_the_paired_rows_and_not_of_two_means() -> None:
    """Rows that are all hard or easy alike: only the difference on each counts, and it is the same on all of them."""
    hard = rows([0.0, 10.0, 20.0])
    assert gain(hard, hard + 0.1, 1.0).item() == pytest.approx(0.1)
    turned = rows([20.0, 10.0, 0.0]) + 0.1  # the same mean
    assert gain(hard, turned, 1.0).item() == pytest.approx(0.1 - math.sqrt(400 / 3))


def test_every_client_has_its_own_rows() -> None:
    """nan rows are no rows: a client's gain is that of its own rows, in whatever company."""
    losses = rows([1.0, 2.0], [0.5, 0.5, 0.5, 0.5], [3.0, 1.0, 2.0])
    others = rows([1.5, 1.5], [1.0, 0.0, 2.0, 1.0], [1.0, 1.0, 1.0])
    together = gain(losses, others, 0.7)
    for k, count in enumerate((2, 4, 3)):
        alone = gain(losses[k : k + 1, :count], others[k : k + 1, :count], 0.7)
        assert together[k].item() == pytest.approx(alone.item())
        difference = (others - losses)[k, :count]
        expected = difference.mean() - 0.7 * difference.std() / math.sqrt(count)
        assert together[k].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("own", [[], [0.0]])
def test_fewer_than_two_rows_say_nothing(own: list[float]) -> None:
    losses, others = rows(own, [0.0, 0.0]), rows([1e6] * len(own), [1.0, 1.0])
    found = gain(losses, others, 0.0)
    assert found[0] < -1e30 and found[1].item() == pytest.approx(1)


@pytest.mark.parametrize("bad", [[INF, INF, INF], [INF, 0.0, 0.0], [0.0, 0.0, INF]])
@pytest.mark.parametrize("caution", [0.0, 1.0])
def test_a_diverged_model_loses(bad: list[float], caution: float) -> None:
    """Also where it is infinite on some rows alone, and better on the others."""
    good = [1.0, 2.0, 3.0]
    assert gain(rows(good), rows(bad), caution).item() > 0
    assert gain(rows(bad), rows(good), caution).item() < 0
    assert gain(rows(bad), rows(bad), caution).item() <= 0  # nothing is gained


def test_nothing_is_gained_by_the_same() -> None:
    losses = rows([1.0, 2.0, 3.0])
    assert gain(losses, losses, 1.0).item() == 0
