"""The mechanism by its equation in float64: clipping, sensitivity, the noise and where it comes from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pf2lora.core.privacy import Mechanism, clipped, standard_normal


def random_updates(clients: int, size: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(clients, size, generator=torch.Generator().manual_seed(seed))


def test_an_update_is_cut_to_the_clip_and_keeps_its_direction() -> None:
    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-30.0, 40.0]])
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [-0.6, 0.8]], dtype=torch.float64)
    found = clipped(updates, 1.0)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]], rtol=1e-15, atol=0)
    assert torch.equal(found[1], updates[1].double())  # within the clip: not a bit changes


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1.0, 1e30, 1e200, 1e308])
def test_no_update_is_longer_than_the_clip_at_any_scale(scale: float) -> None:
    updates = scale * random_updates(20, 300).double().clamp(-1, 1)
    norms = clipped(updates, 0.5).norm(dim=1)
    assert bool(torch.isfinite(norms).all()) and float(norms.max()) <= 0.5 * (1 + 1e-14)
    if 1 <= scale <= 1e30:  # beyond what float32 can hold, an update may count as less
        torch.testing.assert_close(norms, torch.full_like(norms, 0.5), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_counts_as_nothing(bad: float) -> None:
    updates = random_updates(3, 5)
    updates[1, 2] = bad
    found = clipped(updates, 10.0)
    assert torch.equal(found[1], torch.zeros(5, dtype=torch.float64))
    assert torch.equal(found[[0, 2]], updates[[0, 2]].double())


def test_the_mean_update_is_its_equation() -> None:
    mechanism = Mechanism(clip=0.7, noise=1.3, seed=5)
    updates = random_updates(4, 6)
    by_hand = sum(u * min(1.0, 0.7 / float(u.norm())) for u in updates.double())
    by_hand = (by_hand + 1.3 * 0.7 * standard_normal(6, 5, 0, 9)) / 8  # four of eight did not answer
    torch.testing.assert_close(mechanism.mean_update(updates, 8, 0, 9), by_hand, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_one_client_moves_the_mean_by_the_clip_over_all_at_most(seed: int) -> None:
    """Its update, an enormous one, none that is a number, or that it did not answer: against its update being zero."""
    mechanism, clients = Mechanism(clip=0.25, noise=2.0, seed=1), 7
    updates = random_updates(clients, 50, 3.0, seed)
    without = updates.clone()
    without[3] = 0
    base = mechanism.mean_update(without, clients)
    enormous, broken = updates.clone(), updates.clone()
    enormous[3] *= 1e20
    broken[3] = math.nan
    absent = torch.cat([updates[:3], updates[4:]])
    moved = [
        float((mechanism.mean_update(u, clients) - base).norm()) for u in (updates, enormous, broken, absent)
    ]
    assert max(moved) <= 0.25 / clients * (1 + 1e-12)
    assert moved[1] == pytest.approx(0.25 / clients, rel=1e-12)  # and the bound is reached
    assert moved[2:] == pytest.approx([0, 0], abs=1e-16)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_noise_is_normal_with_the_deviation_it_should_have(seed: int | None) -> None:
    mechanism, count = Mechanism(clip=0.5, noise=3.0, seed=seed), 400_000
    noise = mechanism.mean_update(torch.zeros(2, count), 10)  # its deviation: 3 · 0.5 / 10
    z = noise / 0.15
    assert float(z.mean()) == pytest.approx(0, abs=5 / math.sqrt(count))
    assert float(z.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * count))
    for at in (-2.0, -1.0, 0.5, 3.0):
        share = float(torch.special.ndtr(torch.tensor(at, dtype=torch.float64)))
        error = math.sqrt(share * (1 - share) / count)
        assert float((z < at).double().mean()) == pytest.approx(share, abs=5 * error)
    halves = z.view(2, -1)
    assert float((halves[0] * halves[1]).mean()) == pytest.approx(0, abs=5 / math.sqrt(count / 2))


def test_real_noise_is_never_the_same_and_seeded_noise_always_by_its_name() -> None:
    assert not torch.equal(standard_normal(100, None), standard_normal(100, None))
    assert torch.equal(standard_normal(100, 1, 0, 2), standard_normal(100, 1, 0, 2))
    streams = [standard_normal(100, *names) for names in ((1, 0, 2), (1, 0, 3), (1, 1, 2), (2, 0, 2))]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.5


def test_real_noise_is_of_the_operating_systems_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of torch's or numpy's global state, which a seed fixes."""
    asked: list[int] = []

    def all_ones(count: int) -> bytes:
        asked.append(count)
        return b"\xff" * count

    monkeypatch.setattr("pf2lora.core.privacy.os.urandom", all_ones)
    largest = standard_normal(3, None)
    assert asked == [24] and bool(torch.isfinite(largest).all()) and float(largest.min()) > 8
    monkeypatch.setattr("pf2lora.core.privacy.os.urandom", lambda count: bytes(count))
    assert bool(torch.isfinite(standard_normal(3, None)).all())
