"""Names and shapes of the parameters that lie side by side in one flat vector per client.

All of a client's common parameters are one row of a matrix `x (M, P)`, all of its own adapters one row of
`y (M, Q)`. The equations of the paper are then plain arithmetic on two matrices, the optimizer is a few
operations whatever the number of layers, and what is sent is one buffer. A model sees named views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["A", "B", "C", "D", "head"]


@dataclass(frozen=True)
class Entry:
    """One tensor of the flat vector: `module` is the adapted part or the head module it belongs to."""

    module: str
    kind: Kind
    shape: tuple[int, ...]
    parameter: str = ""  # the head's own parameter name ("weight", "bias"); an adapter's is its kind

    @property
    def name(self) -> str:
        return f"{self.module}.{self.parameter or self.kind}"

    @property
    def size(self) -> int:
        return prod(self.shape)

    def truncated(self, rank: int | None) -> tuple[int, ...]:
        """The shape of the entry's first `rank` rows (A, C) or columns (B, D); None is all of them."""
        if rank is None or self.kind == "head":
            return self.shape
        rows, columns = self.shape
        return (min(rank, rows), columns) if self.kind in ("A", "C") else (rows, min(rank, columns))

    def beside(self, what: str) -> Entry:
        """Another tensor of the same shape that belongs to this one, as its control variate or its change."""
        return replace(self, parameter=f"{self.parameter or self.kind}.{what}")

    def truncated_size(self, rank: int | None) -> int:
        """How many numbers its first `rank` rows or columns are."""
        return prod(self.truncated(rank))


@dataclass(frozen=True)
class Layout:
    """The order of the entries. The first `shared` numbers are what a client may send; the rest stay home."""

    entries: tuple[Entry, ...]
    shared: int

    @cached_property
    def sizes(self) -> list[int]:
        return [entry.size for entry in self.entries]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> dict[str, int]:
        offset, offsets = 0, {}
        for entry in self.entries:
            offsets[entry.name] = offset
            offset += entry.size
        return offsets

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @property
    def adapter_size(self) -> int:
        return sum(entry.size for entry in self.entries if entry.kind != "head")

    @property
    def head_size(self) -> int:
        return self.size - self.adapter_size

    @property
    def shared_entries(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if self.offsets[e.name] < self.shared)

    @cached_property
    def shared_part(self) -> Layout:
        """The entries that a client may send, as a layout of their own."""
        return Layout(self.shared_entries, self.shared)

    def shared_kinds(self, *kinds: Kind) -> Layout:
        """The entries of some kinds among those that a client may send."""
        return Layout.of(e for e in self.shared_entries if e.kind in kinds)

    @staticmethod
    def of(entries: Iterable[Entry]) -> Layout:
        """A layout of which everything may be sent."""
        found = tuple(entries)
        return Layout(found, sum(e.size for e in found))

    def select(self, flat: Tensor, part: Layout) -> Tensor:
        """The numbers `(M, n)` of the entries in `part`, some of this layout's in its order: a view where they are
        neighbours."""
        pieces = [flat[:, start:stop] for start, stop in self.spans(part)]
        return pieces[0] if len(pieces) == 1 else torch.cat([flat[:, :0], *pieces], dim=1)

    def replaced(self, flat: Tensor, part: Layout, numbers: Tensor) -> Tensor:
        """`flat (M, P)` with `numbers (M, n)`, or `(n,)` for all, in the place of the entries in `part`."""
        numbers, pieces, at, used = numbers.expand(len(flat), -1), list[Tensor](), 0, 0
        for start, stop in self.spans(part):
            pieces += [flat[:, at:start], numbers[:, used : used + stop - start]]
            at, used = stop, used + stop - start
        return torch.cat([*pieces, flat[:, at:]], dim=1) if pieces else flat

    def spans(self, part: Layout) -> list[tuple[int, int]]:
        """Where the entries of `part` lie in a row of this layout; neighbours are one span."""
        found = list[tuple[int, int]]()
        for entry in part.entries:
            start = self.offsets[entry.name]
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], start + entry.size
            else:
                found.append((start, start + entry.size))
        return found

    @cached_property
    def runs(self) -> list[tuple[Entry, ...]]:
        """Neighbours of one kind and shape: they are read, and their gradients written, as one block."""
        return [tuple(run) for _, run in groupby(self.entries, key=lambda e: (e.kind, e.shape))]

    def blocks(self, flat: Tensor) -> list[Tensor]:
        """Each run of `flat (M, P)` as a view `(M, entries, *shape)`.

        One split, whose backward is one concatenation: slicing entry by entry would build a zero-filled
        gradient of the full size for each of them.
        """
        if flat.shape[-1] != self.size:
            raise ValueError(f"expected {self.size} numbers per client, got {flat.shape[-1]}")
        if not self.entries:
            return []
        pieces = torch.split(flat, [len(run) * run[0].size for run in self.runs], dim=-1)
        return [p.unflatten(-1, (len(run), *run[0].shape)) for p, run in zip(pieces, self.runs)]

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the rows of `flat (M, P)`, each `(M, *shape)`, by name."""
        blocks = zip(self.blocks(flat), self.runs)
        views = (view for block, run in blocks for view in block.unbind(-1 - len(run[0].shape)))
        return {entry.name: view for entry, view in zip(self.entries, views)}

    def pack(self, tensors: dict[str, Tensor]) -> Tensor:
        """The flat rows of named tensors `(M, *shape)`."""
        return torch.cat([tensors[e.name].flatten(-len(e.shape)) for e in self.entries], dim=-1)

    def pairs(self, up: Kind, down: Kind) -> Iterator[tuple[Entry, Entry]]:
        """The factor pairs of the adapters: `pairs("B", "A")` or `pairs("D", "C")`."""
        for entry in self.entries:
            if entry.kind == up:
                yield entry, self.by_name[f"{entry.module}.{down}"]


NO_LAYOUT = Layout((), 0)  # of nothing
