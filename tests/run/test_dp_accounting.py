"""ε and δ, computed a second and a third way; the settings' refusals."""

from __future__ import annotations

import math
import sys

import pytest

from pf2lora.errors import UserError
from pf2lora.run.privacy import PrivacySettings, epsilon, noise_multiplier, releases

CASES = [
    (1.0, 1e-5, 1),
    (5.0, 1e-5, 20),
    (20.0, 1e-6, 500),
    (0.5, 1e-3, 3),
    (0.05, 1e-5, 2),
    (200.0, 1e-5, 10),
]


def delta_of(noise: float, eps: float, times: int) -> float:
    """Balle and Wang's Theorem 8 with μ = √T/σ, by the error function alone: Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    mu = math.sqrt(times) / noise

    def phi(t: float) -> float:
        return math.erfc(-t / math.sqrt(2)) / 2

    tail = phi(-mu / 2 - eps / mu)
    return phi(mu / 2 - eps / mu) - (math.exp(eps) * tail if tail else 0.0)


@pytest.mark.parametrize(("noise", "delta", "times"), CASES)
def test_epsilon_is_the_closed_form(noise: float, delta: float, times: int) -> None:
    eps = epsilon(noise, delta, times)
    assert delta_of(noise, eps, times) == pytest.approx(delta, rel=1e-5)


@pytest.mark.parametrize(("noise", "delta", "times"), [case for case in CASES if case[0] >= 0.5])
def test_epsilon_is_that_of_the_composed_privacy_loss_distribution(
    noise: float, delta: float, times: int
) -> None:
    """The library's general accountant, round by round, against a client that contributes zero; from above."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    ledger = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    for _ in range(min(times, 20)):
        ledger.compose(GaussianDpEvent(noise))
    eps = epsilon(noise, delta, min(times, 20))
    assert eps - 1e-9 <= ledger.get_epsilon(delta) <= eps + 1e-3


@pytest.mark.parametrize(("noise", "delta", "times"), CASES)
def test_renyi_bounds_it_from_above(noise: float, delta: float, times: int) -> None:
    """T Gaussians have Rényi divergence αT/2σ²; ε ≤ αT/2σ² + log(1/δ)/(α − 1) for every α (Mironov, 2017)."""
    alpha = 1 + noise * math.sqrt(2 * math.log(1 / delta) / times)
    bound = alpha * times / (2 * noise**2) + math.log(1 / delta) / (alpha - 1)
    assert epsilon(noise, delta, times) <= bound <= 1.35 * epsilon(noise, delta, times) + 0.2


@pytest.mark.parametrize("target", [0.01, 1.0, 8.0, 300.0])
def test_the_noise_for_an_epsilon_gives_that_epsilon(target: float) -> None:
    noise = noise_multiplier(target, 1e-5, 37)
    assert target * (1 - 1e-6) <= epsilon(noise, 1e-5, 37) <= target


def test_known_values() -> None:
    """As other implementations of the analytic Gaussian mechanism have it."""
    assert noise_multiplier(1.0, 1e-5, 1) == pytest.approx(3.7306, abs=1e-4)
    assert epsilon(3.0, 1e-5, 0) == 0


def test_only_the_rounds_a_client_takes_part_in_count() -> None:
    assert releases([[0, 1], [1, 2], [1], []]) == 3
    assert releases([]) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp_noise": 0.0}, "dp_noise is 0.0; it must be above 0"),
        ({"dp_epsilon": -1.0}, "dp_epsilon is -1.0; it must be above 0"),
        ({"dp_noise": 1.0, "dp_clip": 0.0}, "dp_clip is 0.0; it must be above 0"),
        ({"dp_noise": 1.0, "dp_delta": 1.0}, "dp_delta is 1.0"),
        ({"dp_noise": 1.0, "dp_noise_seed": -1}, "dp_noise_seed is -1"),
        ({"dp_noise_seed": 1}, "there is no noise to draw"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        PrivacySettings(**settings)  # type: ignore[arg-type]


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'pf2lora\[privacy\]'"):
        epsilon(1.0, 1e-5, 3)
