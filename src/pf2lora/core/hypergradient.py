"""The lower level's gradient and the hypergradient's second-order term, three ways.

The hypergradient of client k is `∇_x F(x, y⁺; ξ) − α ∇_xy F(x, y; ζ) · ∇_y F(x, y⁺; ξ̃)`. Each way below
takes the lower level's gradient at (x, y; π) and returns, with it, a function of v for the second-order
term `α ∇_xy F(x, y; ζ) · v`, so that what the first pass computed is used again where ζ is π.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.method import Loss, gradients, variable
from pf2lora.core.second_order import differentiable_twice
from pf2lora.errors import unknown

Rate = float | Tensor
"""α, or one for each client `(M, 1)`."""


class Lower(NamedTuple):
    """The lower level at (x, y; π)."""

    loss: Tensor  # (M,)
    gradient: Tensor  # (M, Q) ∇_y F(x, y; π)
    second_order: Callable[[Tensor], Tensor] | None  # v ↦ α ∇_xy F(x, y; ζ) · v


class Shift(NamedTuple):
    """How far `difference` moves y along v: by `length`, but by `least` of the lower level's step αv at least and by
    `most` of it at most.

    After too short a move the two gradients differ by their rounding, after too long a one by F's third derivatives,
    too. A move to both sides cancels these, for one gradient more.
    """

    length: Tensor  # (M, 1)
    least: float
    most: float = math.inf
    both_sides: bool = False

    def step(self, v: Tensor, alpha: Rate) -> Tensor:
        """(M, 1) each client's ε: y moves by εv."""
        epsilon = self.length / v.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return epsilon.clamp(self.least * alpha, self.most * alpha)


def exact(
    F: Loss, x: Tensor, y: Tensor, alpha: Rate, pi: Any, zeta: Any, shift: Shift | None = None
) -> Lower:
    """Double backward. Where ζ is π, the graph of the lower level's own gradient is differentiated again."""

    def lower_gradient(batch: Any, graph: bool) -> tuple[Tensor, Tensor, Tensor]:
        x_, y_ = variable(x), variable(y)
        with differentiable_twice():
            loss = F(x_, y_, batch)
            return x_, loss, gradients(loss, y_, graph=graph)[0]

    shared = zeta is pi
    x_pi, loss, g_pi = lower_gradient(pi, graph=shared)

    def second_order(v: Tensor) -> Tensor:
        x_, g = (x_pi, g_pi) if shared else lower_gradient(zeta, graph=True)[::2]
        if not g.requires_grad:  # there is no y, or x has no part in its gradient
            return torch.zeros_like(x)
        return alpha * torch.autograd.grad(g, x_, v, materialize_grads=True)[0]

    return Lower(loss.detach(), g_pi.detach(), second_order)


def difference(
    F: Loss, x: Tensor, y: Tensor, alpha: Rate, pi: Any, zeta: Any, shift: Shift | None = None
) -> Lower:
    """`α ∇_xy F · v ≈ (α/ε) (∇_x F(x, y; ζ) − ∇_x F(x, y − εv; ζ))`, ε by `shift`, or α without.

    Ordinary gradients only: any attention kernel, any quantised base. Where ζ is π the first of the two is
    at hand, and a whole local step is three gradients. With `shift.both_sides` it is four, and the term
    `(α/2ε) (∇_x F(x, y + εv; ζ) − ∇_x F(x, y − εv; ζ))`.
    """
    x_, y_ = variable(x), variable(y)
    loss = F(x_, y_, pi)
    gx_pi, g_pi = gradients(loss, x_, y_)

    def gradient_x(y_at: Tensor, batch: Any) -> Tensor:
        x_ = variable(x)
        return gradients(F(x_, y_at, batch), x_)[0]

    def second_order(v: Tensor) -> Tensor:
        if isinstance(alpha, float) and alpha == 0.0:  # a tensor's are above 0
            return torch.zeros_like(x)
        epsilon = alpha if shift is None else shift.step(v, alpha)
        behind = gradient_x(y - epsilon * v, zeta)
        if shift is not None and shift.both_sides:
            return (gradient_x(y + epsilon * v, zeta) - behind) * (alpha / (2 * epsilon))
        here = gx_pi if zeta is pi else gradient_x(y, zeta)
        return (here - behind) * (alpha / epsilon)

    return Lower(loss.detach(), g_pi, second_order)


def none(F: Loss, x: Tensor, y: Tensor, alpha: Rate, pi: Any, zeta: Any, shift: Shift | None = None) -> Lower:
    """Leave the second-order term out: two gradients a step."""
    y_ = variable(y)
    loss = F(x, y_, pi)
    return Lower(loss.detach(), gradients(loss, y_)[0], None)


HYPERGRADIENTS: dict[str, Callable[..., Lower]] = {"exact": exact, "difference": difference, "none": none}


def lower_level(mode: str) -> Callable[..., Lower]:
    """The way called `mode`."""
    if mode not in HYPERGRADIENTS:
        raise unknown("hypergradient mode", mode, HYPERGRADIENTS)
    return HYPERGRADIENTS[mode]


def shortened(step: Tensor, longest: Tensor) -> Tensor:
    """(M, 1) what a step is multiplied by to be no longer than `longest`."""
    return (longest / step.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)


class Hyper(NamedTuple):
    """One bilevel step's outcome: the moved y, the hypergradient, and what is reported."""

    y: Tensor  # (M, Q) y⁺
    gradient: Tensor  # (M, P)
    loss: Tensor  # (M,)
    share: Tensor | None  # (M,) ‖second-order term‖ / ‖hypergradient‖


def bilevel(
    F: Loss,
    x: Tensor,
    y: Tensor,
    alpha: Rate,
    mode: str,
    pi: Any,
    xi: Any,
    xi_tilde: Any,
    zeta: Any,
    shift: Shift | None = None,
    longest: Tensor | None = None,
) -> Hyper:
    """Lines 5 and 6 of Algorithm 1, up to the optimizer of x. Only `difference` asks for the `shift`.

    Where `longest (M, 1)` is given, α is so much smaller for a client whose y would move by more.
    """
    lower = lower_level(mode)(F, x, y, alpha, pi, zeta, shift)
    step = alpha * lower.gradient
    shorter = None if longest is None else shortened(step, longest)
    y_next = y - (step if shorter is None else shorter * step)  # line 5
    x_, y_ = variable(x), variable(y_next)
    if xi_tilde is xi:
        gx, v = gradients(F(x_, y_, xi), x_, y_)
    else:
        (gx,), (v,) = gradients(F(x_, y_next, xi), x_), gradients(F(x, y_, xi_tilde), y_)
    if lower.second_order is None:
        return Hyper(y_next, gx, lower.loss, None)
    second = lower.second_order(v)
    if shorter is not None:
        second = shorter * second  # linear in α
    hyper = gx - second  # the hypergradient; the sign is Algorithm 1's
    return Hyper(y_next, hyper, lower.loss, second.norm(dim=1) / hyper.norm(dim=1).clamp_min(1e-30))
