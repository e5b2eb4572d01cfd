"""The next token of each row: the likeliest, or drawn with the row's own temperature, nucleus and random numbers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

BROKEN = -1  # in the place of a token
COLDEST = 1e-5  # below, the shares of all but the likeliest are none, and logits over the temperature may be infinite


class Sampler:
    """How one row's tokens are chosen. Its random numbers are its own: what it draws for a seed does not depend on who
    shares the pass. A temperature of 0, or so near that it makes no difference, always takes the likeliest."""

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: int | None = None) -> None:
        self.temperature, self.top_p = temperature if temperature >= COLDEST else 0.0, top_p
        first = secrets.randbits(63) if seed is None else seed % 2**63
        self.random = torch.Generator().manual_seed(first)

    def draw(self) -> float:
        return torch.rand((), dtype=torch.float64, generator=self.random).item()


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """A token for each row of `logits (n, V)`; none, `BROKEN`, where a row's are no numbers."""
    best, tokens = logits.max(dim=-1)
    sound = torch.isfinite(best).tolist()
    for nucleus in (False, True):  # apart: who is sorted must not hang on who is beside
        drawing = [
            i for i, s in enumerate(samplers) if sound[i] and s.temperature > 0 and (s.top_p < 1) == nucleus
        ]
        if drawing:
            tokens[drawing] = drawn(logits[drawing], [samplers[i] for i in drawing], nucleus=nucleus)
    return [token if fine else BROKEN for token, fine in zip(tokens.tolist(), sound)]


def drawn(logits: Tensor, samplers: Sequence[Sampler], *, nucleus: bool) -> Tensor:
    """By the inverse of the distribution function: one number of each row's own decides."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    shares = torch.softmax(logits.double() / column([s.temperature for s in samplers]), dim=-1)
    order = None
    if nucleus:
        shares, order = shares.sort(dim=-1, descending=True, stable=True)
        likelier = shares.cumsum(-1) - shares
        outside = likelier >= column([s.top_p for s in samplers])
        outside[:, 0] = False  # the likeliest stays, whatever is asked for
        shares = shares.masked_fill(outside, 0)
    total = shares.cumsum(-1)
    whole = total[:, -1:]
    at = torch.minimum(column([s.draw() for s in samplers]) * whole, torch.nextafter(whole, 0 * whole))
    found = torch.searchsorted(total, at, right=True)
    return (found if order is None else order.gather(1, found)).squeeze(1)
