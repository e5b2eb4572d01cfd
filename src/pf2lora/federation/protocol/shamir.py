"""Shamir's secret sharing: any `threshold` of the shares give the secret, fewer tell nothing of it (Shamir, 1979)."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping

PRIME = 2**521 - 1  # above any secret of 64 bytes
SHARE = 66  # bytes
SECRET = 32  # bytes
TRIES = 2000  # subsets of shares that are tried when some are wrong


class NoSecret(ValueError):
    """The shares do not give the secret."""


def split(secret: bytes, count: int, threshold: int) -> dict[int, bytes]:
    """Shares 1 to `count` of a secret of 32 bytes: values of a random polynomial of degree `threshold` − 1."""
    assert len(secret) == SECRET and 0 < threshold <= count
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {at: value(coefficients, at).to_bytes(SHARE, "big") for at in range(1, count + 1)}


def value(coefficients: list[int], at: int) -> int:
    """The polynomial's value, by Horner's rule."""
    found = 0
    for coefficient in reversed(coefficients):
        found = (found * at + coefficient) % PRIME
    return found


def join(
    shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]
) -> tuple[bytes, set[int]]:
    """The secret that `fits`, and which shares are wrong, as far as they stood in the way. `NoSecret` where no
    `threshold` of them give it."""
    for tried, chosen in enumerate(
        itertools.islice(itertools.combinations(sorted(shares), threshold), TRIES)
    ):
        points = {at: int.from_bytes(shares[at], "big") for at in chosen}
        secret = interpolated(points, 0)
        if secret < 2 ** (8 * SECRET) and fits(found := secret.to_bytes(SECRET, "big")):
            others = (
                {at: int.from_bytes(shares[at], "big") for at in shares if at not in points} if tried else {}
            )
            return found, {at for at, share in others.items() if interpolated(points, at) != share}
    raise NoSecret(f"{len(shares)} shares, of which {threshold} are needed, do not give the secret")


def interpolated(points: Mapping[int, int], at: int) -> int:
    """The value at `at` of the polynomial through the points, by Lagrange's formula."""
    total = 0
    for i, y in points.items():
        above = below = 1
        for j in points:
            if j != i:
                above, below = above * (at - j) % PRIME, below * (i - j) % PRIME
        total += y * above * pow(below, -1, PRIME)
    return total % PRIME
