"""`zeta_size`: the rows that the second-order term is computed from stand for the batch, which is sorted by length."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_data, tiny_problem
from torch import Tensor

from pf2lora.engines.batches import Batch, EncodedSource
from pf2lora.methods.pf2lora import PF2LoRA

SIZE = 16


def lengths(batch: Batch) -> Tensor:
    """(M, rows)"""
    return batch.tensors["attention_mask"].sum(1).view(batch.clients, -1).double()


@pytest.mark.parametrize("count", range(1, SIZE))
def test_the_rows_are_spread_evenly(count: int) -> None:
    part = Batch(1, {"position": torch.arange(SIZE)}).spread(count).tensors["position"]
    assert len(part) == count and (part.diff() > 0).all()
    assert part.double().mean() == pytest.approx((SIZE - 1) / 2, abs=0.5)
    if count > 1:
        assert (part[0], part[-1]) == (0, SIZE - 1)
        assert part.diff().max() - part.diff().min() <= 1


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_zeta_is_as_long_as_its_batch(count: int) -> None:
    """The first rows of a batch are its shortest: they are 4 to 7 tokens of 38 short."""
    source = EncodedSource(tiny_data((96, 128), longest=60), ["a", "b"], SIZE, (0,), window=4)
    p = tiny_problem("bert", sizes=(1, 1))
    method = PF2LoRA(p.layout, batches=4, zeta_size=count)
    zetas: list[Tensor] = []

    def F(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        if lengths(batch).shape[1] == count:
            zetas.append(lengths(batch))
        return (x[:, :1] * y[:, :1]).sum(1)

    whole = []
    for step in range(12):
        drawn = [source.draw([0, 1], [4 * step + i] * 2) for i in range(4)]
        whole.append(lengths(drawn[3]))
        method.step(F, method.init(p.x, p.y), *drawn)
    taken, batches = torch.stack(zetas[::2]), torch.stack(whole)  # (steps, M, rows); a ζ is looked at twice
    assert len(taken) == len(batches)
    assert ((taken.mean((0, 2)) - batches.mean((0, 2))).abs() < 1.5).all()
    if count > 1:
        assert torch.equal(taken.amin(2), batches.amin(2)) and torch.equal(taken.amax(2), batches.amax(2))
