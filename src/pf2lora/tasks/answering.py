"""Every row of every client answered once, as many at a time as the device has memory for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pf2lora.engines.batches import Batch, Encoded
from pf2lora.engines.room import Room, attempt

Answers = TypeVar("Answers")

ROWS_ANSWERED: ContextVar[Callable[[int], None]] = ContextVar("rows answered", default=lambda rows: None)
"""Who is told how many more rows were answered, while a run evaluates: a bar that would stand still otherwise."""


@contextmanager
def telling_rows(tell: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile `tell` hears of every batch of rows that was answered."""
    before = ROWS_ANSWERED.set(tell)
    try:
        yield
    finally:
        ROWS_ANSWERED.reset(before)


class EvaluationBatch(NamedTuple):
    """Rows of several clients for one forward pass; `real[i]` of client i's rows are not filling."""

    clients: list[int]
    rows: np.ndarray  # (K·b,) of the encoded data
    real: list[int]
    start: int = 0  # how many longer rows of each client come before these


def evaluation_batches(
    encoded: Encoded, size: int, room: Room, run: Callable[[EvaluationBatch], Answers], alike: bool = False
) -> Iterator[tuple[EvaluationBatch, Answers]]:
    """`run` of every row of every client once, longest rows first: `size` of each client's at a time, or as many as
    there is room for, and as many more of shorter ones as have no more tokens, unless short rows cost `alike`. Where
    memory ends, a batch is done again in parts.

    Clients that have run out of rows drop out of the stack; a client's last batch is filled with its last row.
    """
    orders = [
        start + np.argsort(-encoded.lengths[start:stop], kind="stable") for start, stop in encoded.spans
    ]

    def longest(clients: Sequence[int], start: int) -> int:
        """How many tokens a batch of these clients has for each row, where it begins with row `start` of each."""
        return 1 if alike else encoded.length(np.array([orders[k][start] for k in clients]))

    most = max(map(len, orders), default=0)
    # Who have as many rows share passes to the last of them.
    waiting = [(sorted(range(len(orders)), key=lambda k: -len(orders[k])), 0, most)]
    while waiting:
        clients, start, stop = waiting.pop()
        clients = [k for k in clients if start < min(stop, len(orders[k]))]
        if not clients:
            continue
        together = clients[: room.clients]
        tokens, of_row = longest(together, 0), longest(together, start)
        rows = min(stop - start, (room.rows or size) * tokens // of_row, room.short or stop)
        # The rest comes after these: the other clients, and before them the same clients' shorter rows.
        waiting += [(clients[len(together) :], start, stop), (together, start + rows, stop)]
        batch = filled_batch(orders, together, start, start + rows)
        done = attempt(run, batch)
        if done is None:
            tried = len(batch.rows) // len(together)
            if not (len(together) == tried == 1 and room.give_back()):
                room.halve(len(together), tried, -(-tried * of_row // tokens))
            waiting.append((together, start, start + rows))
            continue
        yield batch, done[0]
        ROWS_ANSWERED.get()(sum(batch.real))


def filled_batch(orders: Sequence[np.ndarray], clients: list[int], start: int, stop: int) -> EvaluationBatch:
    """The clients' rows in their order from `start` to `stop`, as many of each."""
    rows = [orders[k][start:stop] for k in clients]
    width = max(map(len, rows))
    filled = [np.concatenate([r, np.repeat(r[-1:], width - len(r))]) for r in rows]
    return EvaluationBatch(clients, np.concatenate(filled), [len(r) for r in rows], start)


def answered_batches(
    function: Callable[[Tensor, Tensor, Batch], Answers],
    common: Tensor,
    personal: Tensor,
    encoded: Encoded,
    size: int,
    room: Room,
    alike: bool = False,
    question: str = "",
) -> Iterator[tuple[EvaluationBatch, Answers]]:
    """`function` of the clients' models and every batch of their rows. It is tensors and can be recorded where it is a
    `question` that is asked again and again."""
    device = encoded.device

    # Who answer batch after batch, and may come from the host.
    held: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def models_of(clients: tuple[int, ...]) -> tuple[Tensor, ...]:
        if clients not in held:
            held.clear()  # before others take their place: a smaller pass may be one for which there was no memory
            at = torch.tensor(clients)
            held[clients] = tuple(t.index_select(0, at.to(t.device)).to(device) for t in (common, personal))
        return held[clients]

    def run(batch: EvaluationBatch) -> Answers:
        with torch.no_grad():
            x, y = models_of(tuple(batch.clients))
            rows = encoded.batch(len(batch.clients), batch.rows)
            if question and room.recorder is not None:
                return room.recorder(question, function, x, y, rows)  # type: ignore[arg-type, return-value]
            return function(x, y, rows)

    yield from evaluation_batches(encoded, size, room, run, alike)


def predict_rows(
    function: Callable[[Tensor, Tensor, Batch], Any],
    common: Tensor,
    personal: Tensor,
    encoded: Encoded,
    size: int,
    room: Room | None = None,
    alike: bool = False,
    question: str = "",
    read: Callable[[Any], Sequence[Any]] = lambda found: found,
) -> list[list[Any]]:
    """`function` of every row, per client in the rows' order; it returns one answer per row of its batch, or what
    `read` makes such answers of."""
    answers: list[list[Any]] = [[None] * n for n in encoded.sizes()]
    spans = encoded.spans
    answered = answered_batches(function, common, personal, encoded, size, room or Room(), alike, question)
    for (clients, index, real, _), answer in answered:
        found, width = read(answer), len(index) // len(clients)
        for i, (k, count) in enumerate(zip(clients, real)):
            for j in range(i * width, i * width + count):
                answers[k][index[j] - spans[k][0]] = found[j]
    return answers
