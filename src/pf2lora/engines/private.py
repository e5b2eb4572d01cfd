"""A private round's two ends: what its participants begin with, and the noisy mean of what they made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from pf2lora.core.method import Method, State
from pf2lora.core.privacy import Mechanism
from pf2lora.errors import UserError


def common_start(method: Method, participants: State) -> Tensor:
    """What each of a round's participants would send had it not trained `(n,)`: the same for all, as it is what they
    were served, or where all began. Their updates are measured from there."""
    _, start = method.send(participants)
    if not torch.equal(start, start[:1].expand_as(start)):
        raise UserError(
            f"{method.name} has no differential privacy: its clients do not begin a round with the same common adapter"
        )
    return start[0].clone()


def private_mean(
    how: Mechanism, sent: Tensor, start: Tensor, expected: int, seed: int, number: int
) -> Tensor:
    """The one row `(1, n)` that the server gets to see in place of what came `(K, n)` of `expected` participants."""
    mean = how.mean_update(sent.double() - start.double(), expected, seed, number)
    return (start.double() + mean).to(sent).unsqueeze(0)
