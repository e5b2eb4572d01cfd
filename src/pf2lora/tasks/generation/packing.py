"""Short examples side by side in one row of tokens, so that little of a batch is padding.

Nothing but the row is shared: attention stays inside an example (`adapters.architectures.packed_mask`), positions begin
anew with each of them, and nothing is predicted across a border. The losses are those of the examples by themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pf2lora.tasks.generation.tokens import Tokens


class Packed(NamedTuple):
    """The columns of packed rows: `example` numbers those of a row from 1 (padding is 0), `position` counts in each."""

    columns: Mapping[str, list[list[int]]]
    sizes: list[int]  # of each client, in rows


def pack(clients: Sequence[Sequence[Tokens]], length: int) -> Packed:
    """Each client's examples in rows of at most `length` tokens."""
    columns: dict[str, list[list[int]]] = {
        name: [] for name in ("input_ids", "target", "example", "position")
    }
    sizes = []
    for own in clients:
        rows = best_fit([len(tokens.ids) for tokens in own], length)
        sizes.append(len(rows))
        for row in rows:
            members = [own[i] for i in row]
            columns["input_ids"].append([token for m in members for token in m.ids])
            # Nothing predicts an example's first token, as nothing does in a row of its own.
            columns["target"].append([flag for m in members for flag in (0, *m.target[1:])])
            columns["example"].append([n for n, m in enumerate(members, 1) for _ in m.ids])
            columns["position"].append([at for m in members for at in range(len(m.ids))])
    return Packed(columns, sizes)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which items share a row of `room`: the longest first, each into the row that it fills best. The rows are in the
    order of their first items, so that a client's rows depend on nothing but its own examples."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # what is left in which row, the fullest first
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(left, (lengths[item], -1))
        if at == len(left):
            rows.append([item])
            insort(left, (room - lengths[item], len(rows) - 1))
        else:
            space, row = left.pop(at)
            rows[row].append(item)
            insort(left, (space - lengths[item], row))
    return sorted(sorted(row) for row in rows)
