"""Random streams that belong to somebody: each is a function of the seed and of names, never of who else is there."""

from __future__ import annotations

import hashlib

import numpy as np

from pf2lora.errors import UserError


def stream_seed(seed: int, *names: object) -> int:
    """A 63-bit seed from a run's seed and the names of what it is for."""
    if seed < 0:
        raise UserError(f"the seed is {seed}; it must be 0 or more")
    digest = hashlib.sha256("\x1f".join([str(seed), *map(str, names)]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def numpy_generator(seed: int, *names: object) -> np.random.Generator:
    """A numpy generator for the stream of `names`."""
    return np.random.default_rng(stream_seed(seed, *names))
