"""The loss of a batch in parts: each part's gradient is taken at once, and nothing of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pf2lora.core.second_order import is_differentiated_twice
from pf2lora.engines.batches import Batch

Sums = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Tensor]]
"""`(x, y, batch) ↦` each client's summed losses and their summed weights, both (M,)."""


def mean_loss(sums: Sums, x: Tensor, y: Tensor, batch: Batch, rows: int | None = None) -> Tensor:
    """Each client's mean loss (M,), of `rows` of its rows at a time; None: of all at once. A pass that is
    differentiated twice is always of all."""
    parts = [batch] if rows is None else batch.parts(rows)
    if len(parts) == 1 or is_differentiated_twice():
        losses, weights = sums(x, y, batch)
        return losses / weights
    mean: Tensor = PartByPart.apply(x, y, sums, parts)
    return mean


class PartByPart(torch.autograd.Function):
    """A client's loss depends on its own row of x and of y, so that its gradient is what comes back for it times the
    gradient that was summed up here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, sums: Sums, parts: Sequence[Batch]) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        slopes = [torch.zeros_like(t) if want else None for t, want in zip((x, y), wanted)]
        total = weight = torch.zeros((), dtype=x.dtype, device=x.device)
        for part in parts:
            with torch.enable_grad():
                at = [t.detach().requires_grad_(want) for t, want in zip((x, y), wanted)]
                losses, weights = sums(at[0], at[1], part)
                by = [t for t in at if t.requires_grad]
                found = iter(torch.autograd.grad(losses.sum(), by, materialize_grads=True) if by else ())
            for slope in slopes:
                if slope is not None:
                    slope += next(found)
            total, weight = total + losses.detach(), weight + weights.detach()
        ctx.save_for_backward(weight, *slopes)
        return total / weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor | None, ...]:
        weight, *slopes = ctx.saved_tensors
        share = (back / weight).unsqueeze(1)
        return *(None if slope is None else share * slope for slope in slopes), None, None
