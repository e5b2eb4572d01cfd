"""A frozen projection with its low-rank addition, added where the product lies.

`baddbmm` first copies what it adds to, and on an accelerator that copy costs more than the addition. As an operation of
its own the product is made and added to in one place, in a compiled pass too, which would undo writing in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


@torch.library.custom_op("pf2lora::adapted_linear", mutates_args=())
def adapted_linear(u: Tensor, weight: Tensor, bias: Tensor | None, inner: Tensor, up: Tensor) -> Tensor:
    """`u Wᵀ + b` of rows u (M·rows, n), plus client by client `inner upᵀ` with inner (M, rows, R) and up (M, m, R)."""
    out = linear(u, weight, bias)
    out.view(len(inner), -1, out.shape[-1]).baddbmm_(inner, up.mT)
    return out


@adapted_linear.register_fake
def _(u: Tensor, weight: Tensor, bias: Tensor | None, inner: Tensor, up: Tensor) -> Tensor:
    return u.new_empty(u.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, _, inner, up = inputs
    ctx.save_for_backward(weight, inner, up)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None]:
    """By the input and the addition's factors; the projection itself is frozen."""
    weight, inner, up = ctx.saved_tensors
    of_input, _, _, of_inner, of_up = ctx.needs_input_grad
    grouped = gradient.reshape(len(inner), -1, gradient.shape[-1])
    return (
        gradient @ weight if of_input else None,
        None,
        None,
        grouped @ up if of_inner else None,
        grouped.mT @ inner if of_up else None,
    )


torch.library.register_autograd("pf2lora::adapted_linear", _backward, setup_context=_keep)
