"""What torch draws from a run's random streams: initial weights, dropout masks, who takes part in a round."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pf2lora.core.streams import numpy_generator, stream_seed

EXAMPLE_STRIDE = 1 << 40  # what the dropout mask of a batch's next example adds to its key


def generator(seed: int, *names: object) -> torch.Generator:
    """A torch generator (CPU) for the stream of `names`."""
    return torch.Generator().manual_seed(stream_seed(seed, *names))


def keep_mask(key: Tensor, layer: int, shape: torch.Size, dropout: float) -> Tensor:
    """Which numbers of a layer's input `(M·b, …, n)` dropout keeps, from one key per client `(M,)`.

    A hash of (key, layer, example, token, feature) in integer arithmetic: the same mask on every device, in any
    company and under any padding, and the same again when a batch is evaluated at a second point, as the
    finite-difference hypergradient needs.
    """
    per_client = shape[0] // key.shape[0]
    index = key.new_zeros(())
    for length, stride in zip((per_client, *shape[1:]), (EXAMPLE_STRIDE, 1 << 20, 1)[-len(shape) :]):
        index = index.unsqueeze(-1) + torch.arange(length, device=key.device) * stride
    h = index + (key + layer * 0x9E3779B9).view(-1, *[1] * index.dim())
    for multiplier, shift in ((-0x4B47D0C4E6D7F6D3, 31), (-0x6B2FB644ECCEEE15, 29), (0x2545F4914F6CDD1D, 32)):
        h = (h ^ ((h >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    uniform = ((h >> 11) & ((1 << 53) - 1)).double() / 2**53
    return (uniform >= dropout).view(shape)


def participants(seed: int, round_number: int, clients: int, fraction: float) -> list[int]:
    """Who takes part in a round: a seeded fraction of the clients, at least one, in order."""
    count = max(1, math.ceil(fraction * clients - 1e-9))
    if count >= clients:
        return list(range(clients))
    chosen = numpy_generator(seed, "participation", round_number).choice(clients, count, replace=False)
    return sorted(int(k) for k in chosen)
