"""How many passes each way to the second-order term takes, and where there is no such term to be had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pf2lora.core.hypergradient import Shift, bilevel, lower_level
from pf2lora.errors import UserError

M, P, Q = 2, 3, 2
ALPHA = 0.1


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "both_sides", "shared", "apart"),
    [("exact", False, 2, 3), ("difference", False, 3, 4), ("difference", True, 4, 4), ("none", False, 2, 2)],
)
def test_what_the_first_pass_computed_is_used_again(
    mode: str, both_sides: bool, shared: int, apart: int
) -> None:
    """Two passes are the lower and the upper gradient. The second-order term takes none by `exact` where ζ is π, as
    its graph is at hand, and one by `difference`; a ζ of its own takes one more, and so do two sides."""
    seen: list[Tensor] = []

    def F(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        seen.append(batch)
        return torch.einsum("mp,pq,mq->m", x.square(), batch, y.square())

    x, y, pi, xi, zeta = (normal(*shape, seed=i) for i, shape in enumerate([(M, P), (M, Q), *[(P, Q)] * 3]))
    shift = Shift(torch.full((M, 1), 0.01, dtype=torch.float64), 0.0, both_sides=both_sides)
    bilevel(F, x, y, ALPHA, mode, pi, xi, xi, pi, shift)
    assert len(seen) == shared
    seen.clear()
    bilevel(F, x, y, ALPHA, mode, pi, xi, xi, zeta, shift)
    assert len(seen) == apart
    seen.clear()
    bilevel(F, x, y, ALPHA, mode, pi, xi, normal(P, Q, seed=9), pi, shift)  # ξ̃ is not ξ: one more above
    assert len(seen) == shared + 1


@pytest.mark.parametrize("mode", ["exact", "difference"])
@pytest.mark.parametrize("separate", [False, True])
def test_without_a_coupling_there_is_no_second_order_term(mode: str, separate: bool) -> None:
    """`F = |x|⁴ + |y|⁴`: ∇_y F moves with y and not with x; its graph has no x in it at all."""

    def F(x: Tensor, y: Tensor, batch: int) -> Tensor:
        return x.pow(4).sum(1) + y.pow(4).sum(1)

    x, y = normal(M, P, seed=1), normal(M, Q, seed=2)
    hyper = bilevel(F, x, y, ALPHA, mode, 1000, 2000, 2000, 3000 if separate else 1000)
    torch.testing.assert_close(hyper.gradient, 4 * x.pow(3), rtol=1e-14, atol=0)
    torch.testing.assert_close(hyper.y, y - ALPHA * 4 * y.pow(3), rtol=1e-14, atol=0)
    assert hyper.share is not None and hyper.share.tolist() == [0.0] * M


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_the_share_is_relative_whatever_the_size_of_the_gradients(scale: float) -> None:
    """`F = c·(y − 2x)²/2` with α = 0.1/c at x = 1, y = 0: 3.6c − 0.36c, so the share is 1/9 for every c."""

    def F(x: Tensor, y: Tensor, batch: int) -> Tensor:
        return scale * (y - 2 * x).square().sum(1) / 2

    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    hyper = bilevel(F, one, zero, 0.1 / scale, "exact", 1, 2, 2, 1)
    assert hyper.gradient.item() == pytest.approx(3.24 * scale)
    assert hyper.share is not None and hyper.share.item() == pytest.approx(1 / 9)


def test_a_loss_without_any_slope_has_a_share_of_zero() -> None:
    """The hypergradient is zero: its share is no division by zero."""
    flat = bilevel(
        lambda x, y, batch: 0 * (x.sum(1) + y.sum(1)),
        normal(M, P, seed=1),
        normal(M, Q, seed=2),
        ALPHA,
        "exact",
        1,
        2,
        2,
        1,
    )
    assert flat.share is not None and flat.share.tolist() == [0.0] * M


def test_an_unknown_way_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^unknown hypergradient mode 'exakt'; did you mean 'exact'"):
        lower_level("exakt")
