"""A private run's messages. What travels is the difference to the common start: every site computes that from the seed,
and the server, who need not know it, can cut each update again and count a site that did not answer as zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pf2lora.core.method import Method, State, Updates
from pf2lora.core.privacy import Mechanism, shortening
from pf2lora.federation.protocol.rows import Rows


def absolute(method: Method, initial: State, answer: Tensor, number: int) -> Tensor:
    """The server's answer to round `number`, `(n,)`, as the method means it: counted from what a client would have sent
    in its `initial` state (of one client), where all began."""
    known: dict[str, Tensor] = {}
    for n in (max(1, number - 1), number):  # a method may send another part every other round
        leaves, (sent,) = method.leaves(n), method.send(initial, n)[1]
        known |= {e.name: sent[leaves.offsets[e.name] :][: e.size] for e in leaves.entries}
    begun = [known[entry.name] for entry in method.arrives(number).entries]
    return torch.cat([answer[:0], *begun]).to(answer) + answer


def noisy(
    how: Mechanism,
    method: Method,
    before: Tensor | None,
    total: Tensor,
    expected: int,
    seed: int,
    number: int,
) -> Updates:
    """What the method gets to merge after round `number`: one row, the last answer's part that the round's updates
    move and their noisy mean. `total (n,)` is their sum, each of them cut."""
    mean = how.released(total, expected, seed, number)
    return one_row(last_answer(method, before, number) + mean, number)


def cut_sum(how: Mechanism, rows: Rows, sites: Sequence[str]) -> Tensor:
    """The sum of what sites sent `(n,)`, in float64, each cut to the clip; they are finite."""
    factors = torch.cat([shortening(rows.part([site]).double(), how.clip) for site in sites])
    return rows.merged(sites, lambda block: (block.double() * factors).sum(0))


def last_answer(method: Method, before: Tensor | None, number: int) -> Tensor:
    """Of the last answer what round `number` moves, `(n,)` in float64; nothing is known of it before the first."""
    leaves = method.leaves(number)
    base = torch.zeros(leaves.size, dtype=torch.float64)
    if before is not None:
        last = method.arrives(number - 1)
        for entry in leaves.entries:
            if entry.name in last.offsets:
                to, at = leaves.offsets[entry.name], last.offsets[entry.name]
                base[to : to + entry.size] = before[at : at + entry.size].double()
    return base


def one_row(mean: Tensor, number: int) -> Updates:
    """A mean as what a method merges, of which nobody knows the parts."""
    return Updates(mean.float().unsqueeze(0), torch.ones(1, dtype=torch.float64), (), number)
