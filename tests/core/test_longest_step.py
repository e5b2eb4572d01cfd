"""A lower step that is no longer than it may be: α is shorter for the client whose y would move further, in both
levels."""

from __future__ import annotations

import pytest
import torch
from tiny import Problem, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.hypergradient import Shift, bilevel, shortened
from pf2lora.engines.batches import Batch

ALPHA, ALL = 0.3, [0, 1, 2]
MODES = ["exact", "difference", "none"]


def lower_gradient(p: Problem, batch: Batch) -> Tensor:
    y_ = p.y.clone().requires_grad_()
    return torch.autograd.grad(p.F(p.x, y_, batch).sum(), y_)[0]


def small_shift(p: Problem) -> Shift:
    return Shift(1e-6 * p.y.norm(dim=1, keepdim=True), least=1e-6)


def test_what_a_step_is_multiplied_by() -> None:
    step = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    longest = torch.tensor([[1.0], [1.0], [1.0], [100.0]])
    assert shortened(step, longest).flatten().tolist() == pytest.approx([0.2, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("mode", MODES)
def test_the_step_is_cut_and_alpha_with_it_in_both_levels(mode: str) -> None:
    """Each client has the y and the hypergradient of its own shorter α; whose step is short enough keeps α."""
    p = regression_problem()
    pi, xi, xi_tilde, zeta = (p.source.draw(ALL, [i] * 3) for i in range(4))
    norms = ALPHA * lower_gradient(p, pi).norm(dim=1, keepdim=True)
    longest = norms * torch.tensor([[0.25], [2.0], [0.5]])
    batches = (pi, xi, xi_tilde, zeta)
    found = bilevel(p.F, p.x, p.y, ALPHA, mode, *batches, small_shift(p), longest)
    for k, factor in enumerate((0.25, 1.0, 0.5)):
        plain = bilevel(p.F, p.x, p.y, factor * ALPHA, mode, *batches, small_shift(p))
        torch.testing.assert_close(found.y[k], plain.y[k], rtol=0, atol=1e-13)
        atol = 1e-7 if mode == "difference" else 1e-12
        torch.testing.assert_close(found.gradient[k], plain.gradient[k], rtol=0, atol=atol)
        torch.testing.assert_close(found.loss[k], plain.loss[k])
        if mode != "none":
            assert found.share is not None and plain.share is not None
            assert found.share[k].item() == pytest.approx(plain.share[k].item(), rel=1e-4)
            whole = bilevel(p.F, p.x, p.y, ALPHA, mode, *batches, small_shift(p))
            if factor < 1:
                assert (whole.gradient[k] - found.gradient[k]).abs().max() > 1e-4  # it does matter
    moved = (found.y - p.y).norm(dim=1, keepdim=True)
    assert (moved <= longest * (1 + 1e-12)).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_short_enough_is_the_plain_one(mode: str) -> None:
    """Bit for bit: a factor of one changes nothing."""
    p = tiny_problem("roberta")
    pi, xi = (p.source.draw(ALL, [i] * 3) for i in range(2))
    longest = torch.full((3, 1), 1e6, dtype=torch.float64)
    plain, cut = (
        bilevel(p.F, p.x, p.y, ALPHA, mode, pi, xi, xi, pi, small_shift(p), bound)
        for bound in (None, longest)
    )
    assert torch.equal(plain.y, cut.y) and torch.equal(plain.gradient, cut.gradient)
