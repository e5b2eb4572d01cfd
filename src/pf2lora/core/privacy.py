"""Client-level differential privacy of what leaves: clipped updates, noise on their sum, a denominator that is known.

With Δ_k the update of client k (what it sends less what it had received), C the clip and σ the noise multiplier,

    Δ̃ = (Σ_k min(1, C/‖Δ_k‖) Δ_k + N(0, σ²C² I)) / K

where K is how many clients the round was to have, whoever answered. Without one client's data (its Δ_k is zero) the sum
moves by C at most, so one round is a Gaussian mechanism with noise multiplier σ; whatever the server makes of Δ̃ is
post-processing. All of it is in float64: what float32 would round could be more than C.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pf2lora.core.randomness import generator


@dataclass(frozen=True)
class Mechanism:
    """`clip` is C and `noise` σ. `seed` takes the place of the operating system's randomness, for tests: who knows it
    can take the noise off again, so a run with a seed has no ε."""

    clip: float
    noise: float
    seed: int | None = None

    def mean_update(self, updates: Tensor, expected: int, *names: object) -> Tensor:
        """Δ̃ `(P,)` of the updates `(K', P)` that came, of `expected` clients. `names` tell one seeded draw from
        another."""
        return self.released(clipped(updates, self.clip).sum(0), expected, *names)

    def released(self, total: Tensor, expected: int, *names: object) -> Tensor:
        """Δ̃ from the sum `(P,)` of updates that are cut already."""
        noise = standard_normal(total.numel(), self.seed, *names).to(total.device)
        return (total + self.noise * self.clip * noise) / expected


def clipped(updates: Tensor, clip: float) -> Tensor:
    """Each client's update, no longer than `clip`, in float64. One that is not all numbers counts as nothing: it has no
    direction, and by that alone it must not stop what others release."""
    updates = updates.double()
    finite = torch.isfinite(updates).all(1, keepdim=True)
    updates = torch.where(finite, updates, torch.zeros_like(updates))
    return updates * shortening(updates, clip)


def shortening(updates: Tensor, clip: float) -> Tensor:
    """The factor `(K, 1)` by which each of some finite updates in float64 is no longer than `clip`."""
    return clip / updates.norm(dim=1, keepdim=True).clamp_min(clip)


def standard_normal(count: int, seed: int | None, *names: object) -> Tensor:
    """`count` independent N(0, 1) in float64: of the operating system's cryptographic generator, or a seed's stream."""
    if seed is None:
        bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(12)
        uniform = torch.from_numpy((bits.astype(np.float64) + 0.5) / 2**52)
    else:
        uniform = torch.rand(count, dtype=torch.float64, generator=generator(seed, "privacy", *names))
        uniform = uniform.clamp_min(2.0**-54)  # 0 would be −∞
    return torch.special.ndtri(uniform)
