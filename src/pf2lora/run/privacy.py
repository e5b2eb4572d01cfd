"""What a private run is: the settings `[privacy]`, and the ε that its rounds cost, by Google's dp-accounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pf2lora.errors import UserError, missing_extra
from pf2lora.settings import require_positive, setting


@dataclass(frozen=True)
class PrivacySettings:
    """Client-level differential privacy of the common adapter: on where `dp_noise` or `dp_epsilon` is given."""

    dp_epsilon: float | None = setting(
        None,
        "client-level differential privacy of the common adapter: the ε that all rounds together may cost",
    )
    dp_noise: float | None = setting(
        None, "instead of an ε: the noise on the sum of the clients' updates, as a multiple of dp_clip"
    )
    dp_clip: float = setting(
        1.0, "with differential privacy: the largest norm of a client's update in a round"
    )
    dp_delta: float = setting(1e-5, "with differential privacy: δ, which must be below 1 / clients")
    dp_noise_seed: int | None = setting(
        None,
        "draw the noise from this seed, for tests: who knows it can take the noise off, so there is no ε",
    )

    def __post_init__(self) -> None:
        require_positive(self, "dp_epsilon", "dp_noise", "dp_clip", "dp_delta")
        if self.dp_epsilon is not None and self.dp_noise is not None:
            raise UserError("dp_epsilon and dp_noise are both given: each follows from the other, give one")
        if self.dp_delta >= 1:
            raise UserError(f"dp_delta is {self.dp_delta}; it is a probability, and below 1 / clients")
        if self.dp_noise_seed is not None and self.dp_noise_seed < 0:
            raise UserError(f"dp_noise_seed is {self.dp_noise_seed}; it must be 0 or more")
        if not self.on and self.dp_noise_seed is not None:
            raise UserError(
                "dp_noise_seed is given without dp_noise or dp_epsilon: there is no noise to draw"
            )

    @property
    def on(self) -> bool:
        """Whether a run is private."""
        return self.dp_epsilon is not None or self.dp_noise is not None


def releases(rounds: Iterable[Sequence[int]]) -> int:
    """How many rounds the client that took part most often took part in; `rounds` are the participants of each.

    Who takes part follows from the run's seed, which is no secret: that a client was drawn by lot hides nothing, and
    there is no amplification by sampling. But a round without it tells nothing new of its data.
    """
    return max(Counter(k for participants in rounds for k in participants).values(), default=0)


def epsilon(noise: float, delta: float, times: int) -> float:
    """The ε of `times` Gaussian mechanisms with this noise multiplier at δ = `delta`: of a client's data against none.

    Composed, however each depends on those before it, they are exactly one with σ / √times (Dong, Roth and Su, 2022),
    whose ε the library computes without a bound's slack (Balle and Wang, 2018).
    """
    return float(dp_accounting().get_epsilon_gaussian(noise / math.sqrt(times), delta)) if times else 0.0


def noise_multiplier(target: float, delta: float, times: int) -> float:
    """The least noise multiplier with which `times` rounds cost no more than ε = `target` at `delta`."""
    exact = math.sqrt(times) * float(dp_accounting().get_sigma_gaussian(target, delta))
    return exact * (1 + 1e-9)  # its root is found to 1e-12: on the safe side of it


def dp_accounting() -> Any:
    """The library; an error names the extra that brings it."""
    try:
        import dp_accounting as found
    except ImportError:
        raise missing_extra("dp-accounting", "privacy", "differential privacy") from None
    return found
