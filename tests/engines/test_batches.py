"""Which rows are in a batch: epochs without gaps, streams that belong to a client, padding that is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_data

from pf2lora.core.randomness import keep_mask, participants, stream_seed
from pf2lora.engines.batches import Batch, EncodedSource, batch_rows
from pf2lora.engines.room import Room
from pf2lora.tasks.answering import EvaluationBatch, evaluation_batches, predict_rows


@pytest.mark.parametrize(("rows", "size"), [(10, 3), (7, 7), (2, 5), (1, 4), (12, 4)])
def test_batches_run_through_epochs_without_a_gap(rows: int, size: int) -> None:
    drawn = np.concatenate([batch_rows(0, "a", rows, n, size) for n in range(6 * rows)])
    assert all(len(batch_rows(0, "a", rows, n, size)) == size for n in range(3))
    epochs = drawn[: len(drawn) // rows * rows].reshape(-1, rows)
    for epoch in epochs:
        assert sorted(epoch) == list(range(rows))  # every row once per epoch
    if rows > 2:
        assert len({tuple(epoch) for epoch in epochs}) > 1  # shuffled anew


def test_a_batch_is_a_function_of_seed_name_and_number_alone() -> None:
    rows = batch_rows(0, "a", 50, 3, 8)
    assert np.array_equal(rows, batch_rows(0, "a", 50, 3, 8))
    for other in (batch_rows(1, "a", 50, 3, 8), batch_rows(0, "b", 50, 3, 8), batch_rows(0, "a", 50, 4, 8)):
        assert not np.array_equal(rows, other)


def test_a_clients_batch_does_not_depend_on_its_company() -> None:
    data = tiny_data((5, 9, 2))
    source = EncodedSource(data, ["a", "b", "c"], 4, seeds=(7,), keyed=True)
    together, alone = source.draw([0, 2, 1], [3, 1, 0]), source.draw([2], [1])
    width = alone.tensors["input_ids"].shape[1]
    assert torch.equal(together.tensors["input_ids"][4:8, :width], alone.tensors["input_ids"])
    assert torch.equal(together.tensors["labels"][4:8], alone.tensors["labels"])
    assert together.key is not None and alone.key is not None and torch.equal(together.key[1:2], alone.key)
    assert len(set(together.key.tolist())) == 3
    turned = EncodedSource(data, ["c", "a", "b"], 4, seeds=(7,), keyed=True).draw([0], [1])
    assert turned.key is not None and torch.equal(turned.key, alone.key)  # by name, not by position
    # without client c at all
    only = EncodedSource(tiny_data((5, 9)), ["a", "b"], 4, seeds=(7,)).draw([1], [0])
    with_c = source.draw([1], [0])
    rows_of_b = set(map(tuple, data.token_columns["input_ids"][5:14].tolist()))
    assert {tuple(r) for r in with_c.tensors["input_ids"].tolist()} <= {
        r[: with_c.tensors["input_ids"].shape[1]] for r in rows_of_b
    }
    assert only.tensors["input_ids"].shape[0] == 4 and only.key is None


def test_rows_are_cut_to_the_longest_and_masked() -> None:
    data = tiny_data((6,))
    index = np.argsort(data.lengths)[:3]
    rows = data.rows(index)
    assert rows["input_ids"].shape[1] == data.lengths[index].max() < data.token_columns["input_ids"].shape[1]
    assert rows["attention_mask"].sum(1).tolist() == data.lengths[index].tolist()
    assert torch.equal(rows["attention_mask"] == 0, rows["input_ids"] == 1)  # padding and nothing else
    eights = type(data)(data.token_columns, data.row_columns, data.lengths, data.starts, pad_to_multiple_of=8)
    shortest = index[:1]
    assert eights.rows(shortest)["input_ids"].shape[1] == min(12, -(-int(data.lengths[shortest[0]]) // 8) * 8)


def test_batches_of_one_step_have_one_length_and_the_same_rows() -> None:
    data = tiny_data((6, 9))
    apart = EncodedSource(data, ["a", "b"], 1, seeds=(3,))
    alike = EncodedSource(data, ["a", "b"], 1, seeds=(3,), alike=2)
    widths = []
    for step in range(8):
        one, other = (alike.draw([0, 1], [2 * step + d] * 2).tensors for d in range(2))
        own = [apart.draw([0, 1], [2 * step + d] * 2).tensors for d in range(2)]
        assert one["input_ids"].shape == other["input_ids"].shape
        assert one["input_ids"].shape[1] == max(o["input_ids"].shape[1] for o in own)
        for padded, short in zip((one, other), own):
            width = short["input_ids"].shape[1]
            assert torch.equal(padded["input_ids"][:, :width], short["input_ids"])
            assert torch.equal(padded["attention_mask"].sum(1), short["attention_mask"].sum(1))
            widths.append(width)
    assert len(set(widths)) > 1  # or there was nothing to make alike


def test_some_rows_of_each_client() -> None:
    batch = Batch(2, {"a": torch.arange(6), "b": torch.arange(12).view(6, 2)}, torch.tensor([1, 2]))
    part = batch.spread(2)
    assert part.tensors["a"].tolist() == [0, 2, 3, 5] and part.tensors["b"].tolist() == [
        [0, 1],
        [4, 5],
        [6, 7],
        [10, 11],
    ]
    assert part.clients == 2 and part.key is batch.key
    assert batch.spread(3) is batch and batch.spread(9) is batch


def test_pooled_rows_are_everybodys() -> None:
    data = tiny_data((5, 9, 2))
    pooled = data.pooled()
    assert pooled.sizes() == [16]
    assert torch.equal(pooled.rows(np.arange(16))["input_ids"], data.rows(np.arange(16))["input_ids"])


@pytest.mark.parametrize("clients_per_pass", [None, 1, 2])
@pytest.mark.parametrize("sizes", [(5, 9, 2), (1, 1), (4, 0, 3)])
def test_evaluation_sees_every_row_once_and_answers_in_order(
    sizes: tuple[int, ...], clients_per_pass: int | None
) -> None:
    data = tiny_data(sizes)
    room = Room(clients_per_pass)
    seen = [i for batch, _ in evaluation_batches(data, 4, room, lambda batch: None) for i in real_rows(batch)]
    assert sorted(seen) == list(range(sum(sizes)))

    def answer(x: torch.Tensor, y: torch.Tensor, batch: Batch) -> list[tuple[float, int]]:
        owner = x[:, 0].repeat_interleave(len(batch.tensors["labels"]) // batch.clients)
        return list(zip(owner.tolist(), batch.tensors["labels"].tolist()))

    x = torch.arange(len(sizes)).view(-1, 1).double()
    answers = predict_rows(answer, x, x, data, 4, room)
    labels = data.row_columns["labels"].tolist()
    for k, (start, stop) in enumerate(zip(data.starts, data.starts[1:])):
        assert answers[k] == [(float(k), label) for label in labels[start:stop]]


@pytest.mark.parametrize("clients_per_pass", [None, 2])
@pytest.mark.parametrize(("size", "rows"), [(1, None), (4, None), (64, 2), (2, 5)])
def test_of_shorter_rows_as_many_more_are_answered_as_have_no_more_tokens(
    size: int, rows: int | None, clients_per_pass: int | None
) -> None:
    data, room = tiny_data((23, 31, 17)), Room(clients_per_pass, rows)
    assert len(set(data.lengths)) > 4
    at_once, batches = rows or size, list(evaluation_batches(data, size, room, lambda batch: None))
    assert sorted(i for batch, _ in batches for i in real_rows(batch)) == list(range(71))
    more = 0
    for batch, _ in batches:
        most = max(int(data.lengths[data.starts[k] : data.starts[k + 1]].max()) for k in batch.clients)
        longest, width = data.length(batch.rows), len(batch.rows) // len(batch.clients)
        assert width * longest <= at_once * most
        last = all(batch.start + width >= data.sizes()[k] for k in batch.clients)
        assert last or (width + 1) * longest > at_once * most  # no room is left
        more += width > at_once
    assert more
    alike = [batch for batch, _ in evaluation_batches(data, size, room, lambda batch: None, alike=True)]
    assert max(len(batch.rows) // len(batch.clients) for batch in alike) == min(at_once, 31)
    assert sorted(i for batch in alike for i in real_rows(batch)) == list(range(71))


def test_memory_that_ends_among_short_rows_leaves_room_for_the_long_ones() -> None:
    """Half of the tokens are half of the longest rows, however many short ones have as many."""
    data, room = tiny_data((40, 40)), Room()
    failed: list[EvaluationBatch] = []

    def once(batch: EvaluationBatch) -> None:
        if batch.start >= 24 and not failed:
            failed.append(batch)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def again(batch: EvaluationBatch) -> None:
        once(batch)
        if failed and batch.start >= 24 and len(batch.clients) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    seen = [i for batch, _ in evaluation_batches(data, 8, room, again) for i in real_rows(batch)]
    assert sorted(seen) == list(range(80)) and (room.clients, room.rows) == (1, None)
    failed.clear()
    room = Room(1)
    seen = [i for batch, _ in evaluation_batches(data, 8, room, once) for i in real_rows(batch)]
    (batch,) = failed
    assert sorted(seen) == list(range(80)) and len(batch.rows) > 8
    assert room.rows is not None and room.rows <= 4


@pytest.mark.parametrize("rows", [None, 1])
def test_short_rows_are_halved_to_the_last(rows: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """What they take is not tokens alone: where even one long row's tokens of them are too many, so many rows are."""
    data, room = tiny_data((40,)), Room(rows=rows)

    def run(batch: EvaluationBatch) -> None:
        if len(batch.rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for again in (False, True):
        batches = [batch for batch, _ in evaluation_batches(data, 3, room, run)]
        assert sorted(i for batch in batches for i in real_rows(batch)) == list(range(40))
        assert max(len(batch.rows) for batch in batches) <= 2
        assert (room.rows, room.short) == (1, 1)
        assert ("3 rows of a client in a pass: from here on 1 at a time" in caplog.text) is not again
        caplog.clear()  # what was found out is kept


def real_rows(batch: EvaluationBatch) -> list[int]:
    clients, index, real, _ = batch
    width = len(index) // len(clients)
    return [int(index[i * width + j]) for i, count in enumerate(real) for j in range(count)]


# ---- dropout masks and participation ----


def test_dropout_keeps_its_share() -> None:
    key = torch.tensor([stream_seed(0, "k", i) for i in range(4)])
    for dropout in (0.1, 0.5):
        mask = keep_mask(key, 0, torch.Size((8, 50, 64)), dropout).double()
        for client in mask.view(4, -1):
            assert client.mean().item() == pytest.approx(
                1 - dropout, abs=5 * (dropout * (1 - dropout) / 6400) ** 0.5
            )
        for axis in range(3):  # no axis is treated alike throughout
            others = tuple(a for a in range(3) if a != axis)
            assert mask.mean(others).std() < 0.05
    assert keep_mask(key, 0, torch.Size((8, 5, 4)), 0.0).all()


def test_masks_differ_by_client_layer_example_token_and_feature() -> None:
    key = torch.tensor([stream_seed(0, "k", i) for i in range(2)])
    mask = keep_mask(key, 0, torch.Size((4, 40, 64)), 0.5)
    other = keep_mask(key, 1, torch.Size((4, 40, 64)), 0.5)

    def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
        return (a == b).double().mean().item()

    pairs = [
        (mask[0], mask[2]),
        (mask, other),
        (mask[0], mask[1]),
        (mask[:, 0], mask[:, 1]),
        (mask[..., 0], mask[..., 1]),
    ]
    for a, b in pairs:
        assert agreement(a, b) == pytest.approx(0.5, abs=0.12)


def test_a_mask_does_not_depend_on_padding_or_company() -> None:
    key = torch.tensor([stream_seed(0, "k", i) for i in range(3)])
    long = keep_mask(key, 2, torch.Size((6, 12, 16)), 0.3)
    short = keep_mask(key[1:2], 2, torch.Size((2, 7, 16)), 0.3)
    assert torch.equal(long[2:4, :7], short)
    fewer = keep_mask(key, 2, torch.Size((3, 12, 16)), 0.3)  # the first row of each client
    assert torch.equal(long[::2], fewer)


def test_participants_are_a_seeded_fraction() -> None:
    assert participants(0, 1, 8, 1.0) == list(range(8))
    assert len(participants(0, 1, 5, 0.01)) == 1  # never nobody
    assert len(participants(0, 1, 10, 0.3)) == 3 and len(participants(0, 1, 8, 0.3)) == 3
    rounds = [participants(0, r, 10, 0.3) for r in range(1, 60)]
    assert rounds == [participants(0, r, 10, 0.3) for r in range(1, 60)]
    assert all(r == sorted(set(r)) for r in rounds) and {k for r in rounds for k in r} == set(range(10))
    assert rounds != [participants(1, r, 10, 0.3) for r in range(1, 60)]
