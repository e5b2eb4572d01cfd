"""The loss of a batch in parts: each part's gradient is taken at once, and nothing of it is kept. Other processes may
take parts, too (engines/helpers.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pf2lora.core.second_order import is_differentiated_twice
from pf2lora.engines.batches import Batch

if TYPE_CHECKING:
    from pf2lora.engines.helpers import Helpers

Sums = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Tensor]]
"""`(x, y, batch) ↦` each client's summed losses and their summed weights, both (M,)."""

Wanted = tuple[bool, bool]
"""Whether the slopes by x and by y are asked for."""


class Summed(NamedTuple):
    """Some rows' losses, with the gradient of their sum."""

    losses: Tensor  # (M,) each client's sum
    weights: Tensor  # (M,)
    slopes: tuple[Tensor | None, Tensor | None]  # by x and by y, where they were wanted


def mean_loss(
    sums: Sums, x: Tensor, y: Tensor, batch: Batch, rows: int | None = None, helpers: Helpers | None = None
) -> Tensor:
    """Each client's mean loss (M,), of `rows` of its rows at a time; None: of all at once. With `helpers` every process
    does so with its own rows of the batch. A pass that is differentiated twice is always of all, in this process."""
    shares = [batch] if helpers is None else shared_out(batch, helpers.size)
    parts = [shares[0]] if rows is None else shares[0].parts(rows)
    if len(shares) * len(parts) == 1 or is_differentiated_twice():
        losses, weights = sums(x, y, batch)
        return losses / weights

    def of_all(x: Tensor, y: Tensor, wanted: Wanted) -> Summed:
        if helpers is None or len(shares) == 1:
            return summed(sums, x, y, parts, wanted)
        with helpers.computing(x, y, shares[1:], rows, wanted) as found:
            own = summed(sums, x, y, parts, wanted)
        return total([own, *found])

    mean: Tensor = PartByPart.apply(x, y, of_all)
    return mean


def shared_out(batch: Batch, size: int) -> list[Batch]:
    """Each process's part of every client's rows; the last ones have none where there are too few."""
    rows = next(iter(batch.tensors.values())).shape[0] // batch.clients
    return batch.parts(-(-rows // size))


def summed(sums: Sums, x: Tensor, y: Tensor, parts: Sequence[Batch], wanted: Wanted) -> Summed:
    """The sums over all parts, one after the other: each one's graph is gone before the next one's pass."""
    losses = weights = torch.zeros((), dtype=x.dtype, device=x.device)
    slopes = [torch.zeros_like(t) if want else None for t, want in zip((x, y), wanted)]
    for part in parts:
        with torch.enable_grad():
            at = [t.detach().requires_grad_(want) for t, want in zip((x, y), wanted)]
            of_part, weights_of_part = sums(at[0], at[1], part)
            by = [t for t in at if t.requires_grad]
            found = iter(torch.autograd.grad(of_part.sum(), by, materialize_grads=True) if by else ())
        for slope in slopes:
            if slope is not None:
                slope += next(found)
        losses, weights = losses + of_part.detach(), weights + weights_of_part.detach()
    return Summed(losses, weights, (slopes[0], slopes[1]))


def total(found: Sequence[Summed]) -> Summed:
    """The sum of what processes found, in their order; written over the first one's slopes."""
    first, *others = found
    losses, weights, slopes = first
    for other in others:
        losses, weights = losses + other.losses, weights + other.weights
        for slope, more in zip(slopes, other.slopes):
            if slope is not None and more is not None:
                slope += more.to(slope.device)
    return Summed(losses, weights, slopes)


class PartByPart(torch.autograd.Function):
    """A client's loss depends on its own row of x and of y, so that its gradient is what comes back for it times the
    gradient that was summed up here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, of_all: Callable[[Tensor, Tensor, Wanted], Summed]) -> Tensor:
        losses, weights, slopes = of_all(x, y, ctx.needs_input_grad[:2])
        ctx.save_for_backward(weights, *slopes)
        return losses / weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor | None, ...]:
        weight, *slopes = ctx.saved_tensors
        share = (back / weight).unsqueeze(1)
        return *(None if slope is None else share * slope for slope in slopes), None
