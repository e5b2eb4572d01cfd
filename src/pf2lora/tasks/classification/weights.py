"""Class weights: what a row's loss counts, so that a client's rare labels count as much as its frequent ones."""

from __future__ import annotations

import torch
from torch import Tensor

from pf2lora.engines.batches import Encoded

COLUMN = "weights"


def balanced_weights(train: Encoded, labels: int) -> Tensor:
    """Each client's weight of each label `(clients, labels)`: n / (c · n_label) for its n training rows of c different
    labels, of which n_label have this one. Their mean over its rows is 1, and so is the weight of a label that it has
    none of. A client counts its own rows alone: nobody is told how many it has."""
    found = []
    for start, stop in zip(train.starts, train.starts[1:]):
        counts = torch.bincount(train.row_columns["labels"][start:stop], minlength=labels).double()
        there = int((counts > 0).sum())
        found.append(torch.where(counts > 0, counts.sum() / (there * counts.clamp_min(1)), 1.0))
    return torch.stack(found)


def row_weights(rows: Encoded, weights: Tensor) -> Tensor:
    """The weight of every row `(N,)`, by its client and its label."""
    counts = torch.tensor([stop - start for start, stop in zip(rows.starts, rows.starts[1:])])
    client = torch.arange(len(weights)).repeat_interleave(counts).to(weights.device)
    return weights[client, rows.row_columns["labels"]]
