"""A private round's two ends: what its participants begin with, and the noisy mean of what they made of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pf2lora.core.method import Method, State, Updates
from pf2lora.core.privacy import Mechanism
from pf2lora.engines.processes import ALONE, Processes
from pf2lora.errors import UserError


def common_start(method: Method, participants: State, number: int) -> Tensor:
    """What each participant of round `number` would send had it not trained `(n,)`: the same for all, as it is what
    they were served, or where all began. Their updates are measured from there."""
    _, start = method.send(participants, number)
    if not torch.equal(start, start[:1].expand_as(start)):
        raise UserError(
            f"{method.name} has no differential privacy: its clients do not begin a round with the same common adapter"
        )
    return start[0].clone()


def noisy(
    how: Mechanism, sent: Updates, start: Tensor, expected: int, seed: int, processes: Processes = ALONE
) -> Updates:
    """What the server gets to see in place of what was sent: one row, the noisy mean over `expected` participants. Who
    was left out counts as zero. Of several processes with a part of the updates each, the first adds the noise."""
    updates = sent.numbers.double() - start.double()
    here = how if processes.first else replace(how, noise=0.0)
    row = start.double() + processes.total(here.mean_update(updates, expected, seed, sent.round))
    return Updates(row.to(sent.numbers).unsqueeze(0), sent.weights.new_ones(1), (), sent.round)
