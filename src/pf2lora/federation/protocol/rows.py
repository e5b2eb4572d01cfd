"""A round's updates as the rows of a matrix, on disk: memory does not grow with the number of sites.

Who is left out is known when all have answered, so a sum cannot be made as they come; but checks, means and medians
need all rows of some columns at a time, not all columns. Rows lie in a file that has no name, which is gone with the
process. A block of columns gives the very numbers of the whole matrix, to the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch
from torch import Tensor

from pf2lora.federation.protocol.checkpoints import writing

AT_ONCE = 1 << 17  # numbers that are looked at together, which bounds memory
WIDTH = 1 << 12  # columns of a block, at least


class Rows:
    """What sites sent in a round, `(n,)` in float32 each. `names` are all that may."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names, self.size = folder, list(names), 0
        self.there: set[str] = set()
        self.file: IO[bytes] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.there

    def put(self, name: str, row: Tensor) -> None:
        """Keep a site's row; an earlier one of it goes."""
        self.put_parts(name, len(row), [(0, row)])

    def put_parts(self, name: str, size: int, parts: Iterable[tuple[int, Tensor]]) -> None:
        """Keep a site's row of `size` numbers, of which there is a part at a time: where it begins, and its numbers."""
        with writing(self.folder):
            if self.file is None or self.size != size:
                self.clear()
                self.file, self.size = TemporaryFile(dir=self.folder, buffering=0), size  # noqa: SIM115
            self.there.discard(name)
            for column, part in parts:
                data = part.detach().cpu().contiguous().numpy()
                rest, at = memoryview(data.data).cast("B"), self.place(name, column)
                while rest:
                    written = os.pwrite(self.file.fileno(), rest, at)
                    rest, at = rest[written:], at + written
        self.there.add(name)

    def clear(self) -> None:
        """Forget all of them."""
        if self.file is not None:
            self.file.close()
        self.file, self.there, self.size = None, set(), 0

    def place(self, name: str, column: int) -> int:
        """Where a number lies in the file."""
        return 4 * (self.names.index(name) * self.size + column)

    def part(self, names: Sequence[str], start: int = 0, stop: int | None = None) -> Tensor:
        """Some columns of some rows `(K, columns)`; all of them, where no columns are named."""
        assert self.file is not None
        stop = self.size if stop is None else min(stop, self.size)
        found = torch.empty(len(names), stop - start)
        with writing(self.folder):
            for name, row in zip(names, found):
                rest, at = memoryview(row.numpy().data).cast("B"), self.place(name, start)
                while rest:
                    read = os.preadv(self.file.fileno(), [rest], at)
                    if read == 0:
                        raise OSError("the round's updates are gone from the disk")
                    rest, at = rest[read:], at + read
        return found

    def blocks(self, names: Collection[str]) -> Iterator[tuple[slice, Tensor]]:
        """All columns of some rows, some at a time: which they are, and their numbers `(K, columns)`."""
        width = max(WIDTH, AT_ONCE // max(1, len(names)) // WIDTH * WIDTH)
        for start in range(0, self.size, width):
            columns = slice(start, min(start + width, self.size))
            yield columns, self.part(list(names), columns.start, columns.stop)

    def merged(self, names: Collection[str], merge: Callable[[Tensor], Tensor]) -> Tensor:
        """What `merge` makes of each column, `(n,)`, in its precision."""
        found: Tensor | None = None
        for columns, block in self.blocks(names):
            part = merge(block)
            found = part.new_empty(self.size) if found is None else found
            found[columns] = part
        assert found is not None, "a round without numbers"
        return found
