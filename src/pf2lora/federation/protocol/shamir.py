"""Shamir's secret sharing: any `threshold` of the shares give the secret, fewer tell nothing of it (Shamir, 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1  # above any secret of 64 bytes
SHARE = 66  # bytes
HASH = 32  # bytes of that by which a share is known again
SECRET = 32  # bytes


class NoSecret(ValueError):
    """The shares do not give the secret."""


def majority(count: int) -> int:
    """How many of `count` sites give a secret: more than half. So a server that asks two questions, for both secrets of
    a site or for two sums of a round, must ask one of them both; and each gives its shares away once."""
    return count // 2 + 1


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


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret; `NoSecret` where these are too few shares, or no secret's."""
    if len(shares) < threshold:
        raise NoSecret(f"{len(shares)} shares, of which {threshold} are needed")
    points = {at: int.from_bytes(shares[at], "big") for at in sorted(shares)[:threshold]}
    secret = interpolated(points, 0)
    if secret >= 2 ** (8 * SECRET):
        raise NoSecret(f"{len(shares)} shares that are of no secret")
    return secret.to_bytes(SECRET, "big")


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
