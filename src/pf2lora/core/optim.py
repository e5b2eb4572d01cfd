"""AdamW and SGD on flat rows, one row per client; each client has its own moments and its own step count."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """What AdamW keeps between steps (SGD: only the count). `step` counts a client's own updates: some skip rounds."""

    mean: Tensor  # (M, P)
    square: Tensor  # (M, P)
    step: Tensor  # (M, 1)


def no_moments(x: Tensor) -> Moments:
    """The state before the first update."""
    return Moments(torch.zeros_like(x), torch.zeros_like(x), x.new_zeros(x.shape[0], 1))


def adamw(
    gradient: Tensor,
    moments: Moments,
    x: Tensor,
    lr: float | Tensor,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, Moments]:
    """One step of decoupled-weight-decay Adam; the numbers are those of `torch.optim.AdamW`. `lr` may be `(P,)`, a
    rate for each number of x, or `(M, 1)`, one for each client."""
    first, second = betas
    step = moments.step + 1
    # In double precision, as torch computes them: 1 − 0.999 is off by 1e-5 in float32.
    mean_share, square_share = ((1 - beta ** step.double()).to(x.dtype) for beta in betas)
    mean = torch.lerp(moments.mean, gradient, 1 - first)
    square = (moments.square * second).addcmul_(gradient, gradient, value=1 - second)
    denominator = (square.sqrt() / square_share.sqrt()).add_(eps)
    update = (mean / denominator).mul_(lr / mean_share)
    return (x * (1 - lr * weight_decay)).sub_(update), Moments(mean, square, step)


def sgd(
    gradient: Tensor, moments: Moments, x: Tensor, lr: float | Tensor, *, weight_decay: float = 0.0
) -> tuple[Tensor, Moments]:
    """One step of plain gradient descent, with the same decoupled weight decay."""
    return (x * (1 - lr * weight_decay)).sub_(lr * gradient), moments._replace(step=moments.step + 1)


OPTIMIZERS: dict[str, Callable[..., tuple[Tensor, Moments]]] = {"adamw": adamw, "sgd": sgd}
