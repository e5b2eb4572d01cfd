"""The factors of adapted layers in the order in which clients hold them, and their first values."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pf2lora.core.layout import Entry, Kind


def factor_entries(shapes: Mapping[str, tuple[int, int]], down: Kind, up: Kind, rank: int) -> list[Entry]:
    """The factors of layers `(m, n)`: equal shapes side by side, all of one kind before the other."""
    order = list(dict.fromkeys(shapes.values()))
    names = sorted(shapes, key=lambda name: order.index(shapes[name]))
    return [Entry(name, down, (rank, shapes[name][1])) for name in names] + [
        Entry(name, up, (shapes[name][0], rank)) for name in names
    ]


def first_values(
    entry: Entry, random: torch.Generator, heads: Mapping[str, Tensor], deviation: float
) -> Tensor:
    """A and C Kaiming-uniform with a = √5, as LoRA does: uniform in ±1/√n; B and D zero; a new head normal."""
    if entry.name in heads:
        return heads[entry.name].detach().cpu().flatten()
    if entry.kind in ("B", "D") or entry.parameter == "bias":
        return torch.zeros(entry.size)
    if entry.kind == "head":
        return torch.randn(entry.size, generator=random) * deviation
    bound = 1 / math.sqrt(entry.shape[1])
    return (torch.rand(entry.size, generator=random) * 2 - 1) * bound
