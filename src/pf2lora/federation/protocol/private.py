"""A private run's messages. What travels is the difference to the common start: every site computes that from the seed,
and the server, who need not know it, can cut each update again and count a site that did not answer as zero."""

from __future__ import annotations

import torch
from torch import Tensor

from pf2lora.core.method import Method, Updates
from pf2lora.core.privacy import Mechanism


def absolute(method: Method, start: Tensor, answer: Tensor, number: int) -> Tensor:
    """The server's answer to round `number`, `(n,)`, as the method means it; all began at `start (1, P)`."""
    (begun,) = method.layout.select(start, method.arrives(number))
    return begun.to(answer) + answer


def noisy(
    how: Mechanism,
    method: Method,
    before: Tensor | None,
    updates: Tensor,
    expected: int,
    seed: int,
    number: int,
) -> Updates:
    """What the method gets to merge after round `number`: one row, the last answer's part that the round's `updates (K,
    n)` move (nothing is known of it before the first) and their noisy mean."""
    base = torch.zeros(updates.shape[1], dtype=torch.float64)
    if before is not None:
        last, leaves = method.arrives(number - 1), method.leaves(number)
        for entry in leaves.entries:
            if entry.name in last.offsets:
                to, at = leaves.offsets[entry.name], last.offsets[entry.name]
                base[to : to + entry.size] = before[at : at + entry.size].double()
    row = base + how.mean_update(updates, expected, seed, number)
    return Updates(row.to(updates).unsqueeze(0), torch.ones(1, dtype=torch.float64), (), number)
