"""What a private run is: the settings `[privacy]`, what they rule out, and the ε that its rounds cost, by Google's
dp-accounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pf2lora.errors import UserError, missing_extra
from pf2lora.settings import require_positive, setting

if TYPE_CHECKING:
    from pf2lora.core.method import Method
    from pf2lora.core.privacy import Mechanism
    from pf2lora.run.config import Config


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


@dataclass(frozen=True)
class PrivacySpent:
    """What a run's common adapters, of all rounds together, cost every client. `epsilon` is None where the noise was
    drawn from a seed; `rounds` are those of the client that took part most often, of which the ε is."""

    epsilon: float | None
    delta: float
    noise: float
    clip: float
    rounds: int

    def sentence(self) -> str:
        """The same in words."""
        how = f"{self.rounds} round{'s' if self.rounds != 1 else ''}, noise {self.noise:.4g} × clip {self.clip:g}"
        if self.epsilon is None:
            return f"no ε: the noise was drawn from a seed ({how})"
        return f"ε = {self.epsilon:.3g} at δ = {self.delta:g} for each client ({how})"


# --- a run -------------------------------------------------------------------------------------------------


def check(config: Config, kind: type[Method], clients: int) -> None:
    """Refuse what would let something of a client out beside the noise."""
    training, privacy = config.training, config.privacy
    if not privacy.on:
        return
    dp_accounting()  # before the training, not after it
    if privacy.dp_epsilon is not None and privacy.dp_noise is not None:
        raise UserError("dp_epsilon and dp_noise are both given: each follows from the other, give one")
    if kind.pooled:
        raise UserError(
            f"{kind.name} pools everybody's data: differential privacy of clients is not offered for it"
        )
    if kind.not_private:
        raise UserError(f"{kind.name} has no differential privacy: {kind.not_private}")
    if training.weighting != "uniform":
        raise UserError(
            f"weighting is {training.weighting!r}: with differential privacy it must be 'uniform', as how many rows "
            "a client has would show"
        )
    if training.patience is not None:
        raise UserError(
            f"patience is {training.patience}: with differential privacy the number of rounds is fixed, as when a run "
            "stops would tell of validation rows"
        )
    if privacy.dp_delta >= 1 / clients:
        raise UserError(
            f"dp_delta is {privacy.dp_delta:g}: with {clients} clients it must be below {1 / clients:g}, or one could "
            "be given away whole"
        )


def check_sent(method: Method) -> None:
    """Refuse a method that sends, or is answered, something else than whole entries of the common adapter: a client's
    update of that is what is cut, and all begin a round with the same."""
    if not sends_the_adapter_alone(method):
        raise UserError(
            f"{method.name} has no differential privacy: something else than the common adapter is sent"
        )


def sends_the_adapter_alone(method: Method) -> bool:
    """Whether all that is sent and answered are whole entries of the common adapter."""
    parts = [
        part for number in (1, 2) for part in (method.leaves(number), method.arrives(number))
    ]  # odd and even
    return all(method.layout.by_name.get(entry.name) == entry for part in parts for entry in part.entries)


def mechanism(
    config: Config, kind: type[Method], clients: int, seeds: Sequence[int], rounds: int | None = None
) -> Mechanism | None:
    """How `rounds` (default: the run's) of each of the seeds are protected; None where they are not, or where nothing
    leaves a client."""
    from pf2lora.core.privacy import Mechanism

    check(config, kind, clients)
    privacy = config.privacy
    if not privacy.on or not kind.federated:
        return None
    noise, rounds = privacy.dp_noise, rounds or config.training.rounds
    if noise is None:
        times = max(releases(participants_of(config, clients, seed, rounds)) for seed in seeds)
        noise = noise_multiplier(float(privacy.dp_epsilon or 0), privacy.dp_delta, times)
    return Mechanism(privacy.dp_clip, noise, privacy.dp_noise_seed)


def spent(config: Config, how: Mechanism | None, clients: int, seed: int, rounds: int) -> PrivacySpent | None:
    """What the first `rounds` rounds with a seed cost."""
    if how is None:
        return None
    times, delta = releases(participants_of(config, clients, seed, rounds)), config.privacy.dp_delta
    eps = None if how.seed is not None else epsilon(how.noise, delta, times)
    return PrivacySpent(eps, delta, how.noise, how.clip, times)


def participants_of(config: Config, clients: int, seed: int, rounds: int) -> list[list[int]]:
    """Who takes part in each of the first `rounds` rounds."""
    from pf2lora.core.randomness import participants

    return [participants(seed, n, clients, config.training.participation) for n in range(1, rounds + 1)]


# --- ε -----------------------------------------------------------------------------------------------------


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
