"""Batches of several clients at once, drawn by number: which rows are in a client's n-th batch is a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from pf2lora.core.randomness import EXAMPLE_STRIDE
from pf2lora.core.streams import numpy_generator, stream_seed
from pf2lora.engines.room import Room

TARGET_STEPS = 8  # what a batch's number of targets is rounded up to, parts of its tokens


@dataclass(frozen=True)
class Batch:
    """M·b rows, client by client. `key (M,)` is where the dropout masks of this batch come from.

    `full` is known without asking the device: no row is padded, so attention needs no mask and its fastest kernel.
    So is `targets`, where tokens are predicted: at most so many of them are; and `row_targets`, of which a batch that
    is computed in parts makes theirs: at most so many of a row.
    """

    clients: int
    tensors: dict[str, Tensor]
    key: Tensor | None = None
    full: bool = False
    targets: int | None = None
    row_targets: int | None = None

    @property
    def length(self) -> int:
        """The tokens of a row, padding included; 1 where rows are not made of tokens."""
        return self.tensors["input_ids"].shape[1] if "input_ids" in self.tensors else 1

    @property
    def mask(self) -> Tensor | None:
        """The attention mask, where there is anything to mask."""
        return None if self.full else self.tensors["attention_mask"]

    def spread(self, count: int) -> Batch:
        """`count` of each client's rows, evenly spaced from the first to the last: rows may be sorted by length."""
        rows = next(iter(self.tensors.values())).shape[0] // self.clients
        if count >= rows:
            return self
        gaps = count - 1
        at = [(i * (rows - 1) + gaps // 2) // gaps for i in range(count)] if gaps else [rows // 2]

        def cut(tensor: Tensor) -> Tensor:  # by slices: a CUDA graph cannot record an index from a list
            of_client = tensor.unflatten(0, (self.clients, rows))
            return torch.stack([of_client[:, i] for i in at], dim=1).flatten(0, 1)

        return replace(self, tensors={n: cut(t) for n, t in self.tensors.items()})

    def parts(self, rows: int) -> list[Batch]:
        """The batch in parts of so many of each client's rows, with the dropout masks that they have in the whole."""
        of_client = {name: t.unflatten(0, (self.clients, -1)) for name, t in self.tensors.items()}
        size = next(iter(of_client.values())).shape[1]

        def part(start: int) -> Batch:
            cut = {name: t[:, start : start + rows].flatten(0, 1) for name, t in of_client.items()}
            key = None if self.key is None else self.key + start * EXAMPLE_STRIDE
            targets, count = self.targets, self.clients * min(rows, size - start)
            if targets is not None and self.row_targets is not None:
                targets = min(targets, count * self.row_targets)
            return replace(self, tensors=cut, key=key, targets=targets)

        return [part(start) for start in range(0, size, rows)]


class BatchSource(Protocol):
    """Where an engine gets batches. Clients are given by position."""

    @property
    def names(self) -> list[str]: ...

    @property
    def sizes(self) -> list[int]: ...

    def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
        """Batch number `numbers[i]` of `clients[i]`, together."""
        ...


@lru_cache(maxsize=4096)
def epoch_order(seed: int, name: str, epoch: int, rows: int) -> np.ndarray:
    """A client's rows in the order of one epoch; nobody else's presence changes it."""
    return numpy_generator(seed, "order", name, epoch).permutation(rows)


def stream_rows(seed: int, name: str, rows: int, start: int, stop: int) -> np.ndarray:
    """Positions `start : stop` of a client's endless stream: epochs are shuffled and run on without a gap."""
    pieces = []
    while start < stop:
        epoch, within = divmod(start, rows)
        piece = epoch_order(seed, name, epoch, rows)[within : within + stop - start]
        pieces.append(piece)
        start += len(piece)
    return np.concatenate(pieces)


def batch_rows(seed: int, name: str, rows: int, number: int, size: int) -> np.ndarray:
    """The rows of a client's batch `number`."""
    return stream_rows(seed, name, rows, number * size, (number + 1) * size)


@lru_cache(maxsize=4096)
def window_order(window: int, batches: int) -> np.ndarray:
    """In which order a window's batches come, by length; the same for all clients and seeds: long meets long."""
    return numpy_generator(0, "window", window).permutation(batches)


def batch_rows_by_length(
    seed: int, name: str, lengths: np.ndarray, number: int, size: int, window: int
) -> np.ndarray:
    """Like `batch_rows`, but the rows of `window` batches in a row are shared out among these batches by length.

    Each row comes as often as before; batches hold rows of like length, which pad little. A client's batches do not
    depend on who else is there.
    """
    which, within = divmod(number, window)
    rows = stream_rows(seed, name, len(lengths), which * window * size, (which + 1) * window * size)
    by_length = rows[np.argsort(lengths[rows], kind="stable")].reshape(window, size)
    return by_length[window_order(which, window)[within]]


@dataclass(frozen=True)
class Encoded:
    """Tokenised rows of several clients, side by side on one device; client k's are `starts[k] : starts[k + 1]`.

    `token_columns` are (N, T) and cut to a batch's longest row, `row_columns` (N, …) are taken whole. `targets (N,)`
    says how many tokens of each row are predicted, where that is known.
    """

    token_columns: dict[str, Tensor]
    row_columns: dict[str, Tensor]
    lengths: np.ndarray
    starts: tuple[int, ...]
    pad_to_multiple_of: int = 1  # a batch's length is rounded up to this
    chosen: tuple[int, ...] | None = None  # the clients that are looked at, in this order; None: each once
    targets: np.ndarray | None = None
    examples: tuple[int, ...] | None = None  # how many clients have, where a row holds several of them

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose rows are looked at: a client may come more than once, as several learners on the same rows."""
        return tuple(range(len(self.starts) - 1)) if self.chosen is None else self.chosen

    def of(self, clients: Sequence[int]) -> Self:
        """The same rows, seen by these of the clients that are looked at."""
        return replace(self, chosen=tuple(map(self.client, clients)))

    def client(self, k: int) -> int:
        """Whose rows those are of the k-th client that is looked at."""
        return k if self.chosen is None else self.chosen[k]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the rows of each client that is looked at begin and end."""
        return [(self.starts[k], self.starts[k + 1]) for k in self.clients]

    def sizes(self) -> list[int]:
        return [stop - start for start, stop in self.spans]

    def example_counts(self) -> list[int]:
        """How many examples each client has, in whatever rows they stand."""
        return self.sizes() if self.examples is None else [self.examples[k] for k in self.clients]

    def length(self, index: np.ndarray) -> int:
        """How long the rows at `index` are when they are padded to the longest of them."""
        width = next(iter(self.token_columns.values())).shape[1]
        return min(
            width, -(-int(self.lengths[index].max()) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        )

    def rows(self, index: np.ndarray, length: int | None = None) -> dict[str, Tensor]:
        """The rows at `index`, padded to `length` or the longest of them; no synchronisation with the device."""
        length = length or self.length(index)
        device = self.device
        at = torch.from_numpy(index).to(device, non_blocking=True)
        out = {
            name: column[:, :length].index_select(0, at).long() for name, column in self.token_columns.items()
        }
        lengths = torch.from_numpy(self.lengths[index]).to(device, non_blocking=True)
        out["attention_mask"] = (torch.arange(length, device=device) < lengths.unsqueeze(1)).long()
        return out | {name: column.index_select(0, at) for name, column in self.row_columns.items()}

    def most_targets(self, index: np.ndarray, length: int) -> int | None:
        """How many tokens of the rows at `index` are predicted at most, in a few steps up to all: not every batch
        is to have a shape of its own."""
        if self.targets is None:
            return None
        step = max(1, len(index) * length // TARGET_STEPS)
        return min(-(-int(self.targets[index].sum()) // step) * step, len(index) * length)

    def most_in_row(self, index: np.ndarray, length: int) -> int | None:
        """How many tokens of one of the rows at `index` are predicted at most, in a few steps, too."""
        if self.targets is None:
            return None
        step = max(1, length // TARGET_STEPS)
        return min(-(-int(self.targets[index].max()) // step) * step, length)

    def batch(self, clients: int, index: np.ndarray) -> Batch:
        """The rows at `index` of so many clients, to be evaluated."""
        return Batch(clients, self.rows(index), targets=self.most_targets(index, self.length(index)))

    @property
    def device(self) -> torch.device:
        return next(iter(self.token_columns.values())).device

    def to(self, device: torch.device) -> Self:
        """The same rows on a device; CUDA's fast products need lengths in eights."""
        return replace(
            self,
            pad_to_multiple_of=max(self.pad_to_multiple_of, 8)
            if device.type == "cuda"
            else self.pad_to_multiple_of,
            token_columns={name: column.to(device) for name, column in self.token_columns.items()},
            row_columns={name: column.to(device) for name, column in self.row_columns.items()},
        )

    def pooled(self) -> Encoded:
        """The same rows as one client's."""
        columns = self.token_columns, self.row_columns
        return Encoded(
            *columns,
            self.lengths,
            (0, self.starts[-1]),
            self.pad_to_multiple_of,
            targets=self.targets,
            examples=None if self.examples is None else (sum(self.examples),),
        )


@dataclass(frozen=True)
class EncodedSource:
    """Training batches of `size` rows from encoded clients, who are there once for each seed: learner `s · M + k` is
    client k with seed s, and its batches do not depend on the other seeds.

    With `keyed`, batches carry dropout keys; with a `window` above 1, rows of like length share a batch; `alike`
    batches in a row (those of one step) have one length, so that a step that is recorded needs one recording for each
    length and not for each pair. `room` says how many rows of a batch are computed at once (None: all)."""

    data: Encoded
    clients: list[str]
    size: int
    seeds: tuple[int, ...]
    keyed: bool = False
    window: int = 1
    alike: int = 1
    room: Room | None = None

    @property
    def names(self) -> list[str]:
        return self.clients * len(self.seeds)

    @property
    def sizes(self) -> list[int]:
        return self.data.example_counts() * len(self.seeds)

    def learner(self, i: int) -> tuple[int, int]:
        """The seed and the client of learner i."""
        s, k = divmod(i, len(self.clients))
        return self.seeds[s], k

    def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
        index = self.rows(clients, numbers)
        length, of_step = self.data.length(index), [index]
        if self.alike > 1:
            first = [number - number % self.alike for number in numbers]
            of_step = [self.rows(clients, [n + i for n in first]) for i in range(self.alike)]
            length = max(self.data.length(rows) for rows in of_step)
        targets = [most for rows in of_step if (most := self.data.most_targets(rows, length)) is not None]
        in_row = [most for rows in of_step if (most := self.data.most_in_row(rows, length)) is not None]
        tensors = self.data.rows(index, length)
        key = None
        if self.keyed:
            keys = [self.dropout_key(i, n) for i, n in zip(clients, numbers)]
            key = torch.tensor(keys, device=tensors["attention_mask"].device)
        full = bool((self.data.lengths[index] == tensors["input_ids"].shape[1]).all())
        # One shape more of a recorded step, which only a batch in parts needs.
        row_targets = max(in_row, default=None) if self.in_parts else None
        return Batch(len(clients), tensors, key, full, max(targets, default=None), row_targets)

    @property
    def in_parts(self) -> bool:
        """Whether a batch is computed in parts."""
        return self.room is not None and self.room.rows is not None and self.room.rows < self.size

    def rows(self, clients: Sequence[int], numbers: Sequence[int]) -> np.ndarray:
        """Where the rows of these batches lie."""
        return np.concatenate([self.learner_rows(i, number) for i, number in zip(clients, numbers)])

    def learner_rows(self, i: int, number: int) -> np.ndarray:
        """Where the rows of learner i's batch `number` lie."""
        seed, k = self.learner(i)
        at = self.data.client(k)
        start, stop = self.data.starts[at : at + 2]
        if self.window == 1:
            return start + batch_rows(seed, self.clients[k], stop - start, number, self.size)
        lengths = self.data.lengths[start:stop]
        return start + batch_rows_by_length(seed, self.clients[k], lengths, number, self.size, self.window)

    def dropout_key(self, i: int, number: int) -> int:
        """Where the dropout masks of learner i's batch `number` come from."""
        seed, k = self.learner(i)
        return stream_seed(seed, "dropout", self.clients[k], number)
