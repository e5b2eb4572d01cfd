"""Numbers in a ring, where masks hide them perfectly: fixed point modulo 2⁶⁴, and masks drawn from a key.

A number v is the whole number nearest to 2³² v, so a sum of K numbers is exact but for K steps of 2⁻³³. The sum must
stay below 2³¹, which each summand is checked for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pf2lora.errors import UserError

STEP = 2.0**-32  # of the fixed point
ROOM = 2.0**31  # what a sum stays below


class TooLarge(UserError):
    """An update has numbers that the ring has no room for."""


def to_ring(values: Tensor, sites: int) -> Tensor:
    """The numbers as whole ones, int64, so that those of `sites` sites can be added."""
    exact = values.detach().cpu().double()
    if exact.numel() and not float(exact.abs().max()) < ROOM / sites:  # false for nan, too
        raise TooLarge(f"an update has numbers beyond ±{ROOM / sites:.3g}, which masks have no room for")
    return torch.round(exact / STEP).to(torch.int64)


def from_ring(total: Tensor) -> Tensor:
    """The number that a sum stands for, float64."""
    return total.double() * STEP


def mask(key: bytes, count: int) -> Tensor:
    """`count` numbers of the ring from a key of 32 bytes: AES-256 in counter mode, which a key is used for once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    drawn = np.frombuffer(stream.update(bytes(8 * count)), dtype="<i8")
    return torch.from_numpy(drawn.astype(np.int64))
