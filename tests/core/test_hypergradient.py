"""The hypergradient against autodiff through the unrolled lower step, against explicit Jacobians, and by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import CONFIGS, Problem, regression_problem, tiny_problem
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pf2lora.core.hypergradient import Shift, bilevel, difference, exact
from pf2lora.core.method import Loss
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA

P, Q, M = 4, 3, 3
ALPHA = 0.07


def curved(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    """A bilinear coupling and enough curvature that no term of the formula vanishes; `batch` is (M, P, Q)."""
    coupling = torch.einsum("mp,mpq,mq->m", torch.tanh(x), batch, y)
    return (
        coupling
        + (y.square() * (1 + x[:, :Q].square())).sum(1)
        + torch.sin(batch.sum(2) * x).sum(1) * y.exp().sum(1)
    )


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def point() -> tuple[Tensor, Tensor]:
    return normal(M, P, seed=1), normal(M, Q, seed=2)


def batches(count: int) -> list[Any]:
    return [normal(M, P, Q, seed=10 + i) for i in range(count)]


def unrolled(F: Loss, x: Tensor, y: Tensor, alpha: float, pi: object, xi: object) -> Tensor:
    """Autodiff of `x ↦ F(x, y − α∇_yF(x, y; π); ξ)`."""
    x_, y_ = x.clone().requires_grad_(), y.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (g,) = torch.autograd.grad(F(x_, y_, pi).sum(), y_, create_graph=True)
        return torch.autograd.grad(F(x_, y_ - alpha * g, xi).sum(), x_)[0]


def by_jacobians(
    F: Loss, x: Tensor, y: Tensor, alpha: float, pi: object, xi: object, xi_tilde: object, zeta: object
) -> Tensor:
    """`∇_x F(x, y⁺; ξ) − α ∇_xy F(x, y; ζ) · ∇_y F(x, y⁺; ξ̃)` with ∇_xy F written out as a matrix per client."""

    def grad_x(x: Tensor, y: Tensor, batch: object) -> Tensor:
        return torch.func.grad(lambda x: F(x, y, batch).sum())(x)

    def grad_y(x: Tensor, y: Tensor, batch: object) -> Tensor:
        return torch.func.grad(lambda y: F(x, y, batch).sum())(y)

    y_next = y - alpha * grad_y(x, y, pi)
    whole = torch.func.jacrev(lambda x: grad_y(x, y, zeta))(
        x
    )  # (M, Q, M, P): blocks off the diagonal are zero
    rows = []
    for k in range(len(x)):
        cross = whole[k, :, k, :].T  # ∇_xy F of client k, (P, Q)
        rows.append(grad_x(x, y_next, xi)[k] - alpha * cross @ grad_y(x, y_next, xi_tilde)[k])
    return torch.stack(rows)


def test_exact_equals_autodiff_through_the_lower_step(point: tuple[Tensor, Tensor]) -> None:
    pi, xi = batches(2)
    hyper = bilevel(curved, *point, ALPHA, "exact", pi, xi, xi, pi)
    assert (hyper.gradient - unrolled(curved, *point, ALPHA, pi, xi)).abs().max() <= 1e-10
    y_ = point[1].clone().requires_grad_()
    (g,) = torch.autograd.grad(curved(point[0], y_, pi).sum(), y_)
    torch.testing.assert_close(hyper.y, point[1] - ALPHA * g, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["roberta", "deberta-v2", "gpt2", "llama"])
def test_exact_equals_autodiff_on_a_transformer(kind: str) -> None:
    p = tiny_problem(kind)
    pi, xi = (p.source.draw([0, 1, 2], [i, i, i]) for i in (0, 1))
    hyper = bilevel(p.F, p.x, p.y, ALPHA, "exact", pi, xi, xi, pi)
    assert (hyper.gradient - unrolled(p.F, p.x, p.y, ALPHA, pi, xi)).abs().max() <= 1e-10
    plain = bilevel(p.F, p.x, p.y, ALPHA, "none", pi, xi, xi, pi)
    assert (hyper.gradient - plain.gradient).abs().max() > 1e-6  # the second-order term is there to be missed


def test_four_independent_batches_follow_the_formula(point: tuple[Tensor, Tensor]) -> None:
    four = batches(4)
    hyper = bilevel(curved, *point, ALPHA, "exact", *four)
    assert (hyper.gradient - by_jacobians(curved, *point, ALPHA, *four)).abs().max() <= 1e-10
    # each batch has its own place: exchanging any two changes the answer
    for i in range(4):
        for j in range(i):
            swapped = list(four)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            assert (
                hyper.gradient - bilevel(curved, *point, ALPHA, "exact", *swapped).gradient
            ).abs().max() > 1e-4


def test_pf2lora_hands_the_four_batches_over_in_the_order_of_line_4() -> None:
    p = regression_problem()
    four = [p.source.draw([0, 1, 2], [i] * 3) for i in range(4)]
    method = PF2LoRA(p.layout, client_lr=ALPHA, hypergradient_mode="exact", batches=4)
    state, _ = method.step(p.F, method.init(p.x, p.y), *four)
    expected = by_jacobians(p.F, p.x, p.y, ALPHA, *four)
    assert (
        state.opt.mean / 0.1 - expected
    ).abs().max() <= 1e-10  # AdamW's first mean is a tenth of the gradient


def test_the_sign_is_that_of_algorithm_1() -> None:
    """`F = (y − 2x)²/2` at x = 1, y = 0, α = 0.1: y⁺ = 0.2, and 3.6 − 0.1 · (−2) · (−1.8) = 3.24."""

    def F(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return (y - 2 * x).square().sum(1) / 2

    x, y = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for mode in ("exact", "difference"):
        hyper = bilevel(F, x, y, 0.1, mode, None, None, None, None)
        assert hyper.y.item() == pytest.approx(0.2)
        assert hyper.gradient.item() == pytest.approx(3.24)
        assert hyper.share is not None and hyper.share.item() == pytest.approx(0.36 / 3.24)


def test_none_leaves_out_only_the_second_order_term(point: tuple[Tensor, Tensor]) -> None:
    pi, xi = batches(2)
    hyper, full = (bilevel(curved, *point, ALPHA, mode, pi, xi, xi, pi) for mode in ("none", "exact"))
    x_ = point[0].clone().requires_grad_()
    (gx,) = torch.autograd.grad(curved(x_, full.y, xi).sum(), x_)
    torch.testing.assert_close(hyper.gradient, gx, rtol=0, atol=1e-12)
    torch.testing.assert_close(hyper.y, full.y, rtol=0, atol=1e-14)
    assert hyper.share is None


def test_the_reported_share_is_the_second_order_terms_part_of_the_norm(point: tuple[Tensor, Tensor]) -> None:
    pi, xi = batches(2)
    with_it, without = (bilevel(curved, *point, ALPHA, mode, pi, xi, xi, pi) for mode in ("exact", "none"))
    term = without.gradient - with_it.gradient
    assert with_it.share is not None
    torch.testing.assert_close(with_it.share, term.norm(dim=1) / with_it.gradient.norm(dim=1))


@pytest.mark.parametrize(("both_sides", "order"), [(False, 1), (True, 2)])
def test_difference_approaches_exact_as_its_step_falls(
    point: tuple[Tensor, Tensor], both_sides: bool, order: int
) -> None:
    pi, zeta = batches(2)
    v = normal(M, Q, seed=3)
    for last in (pi, zeta):
        truth = exact(curved, *point, ALPHA, pi, last).second_order(v)  # type: ignore[misc]
        errors = []
        for step in (1e-1, 1e-2, 1e-3):
            shift = Shift(step * v.norm(dim=1, keepdim=True), least=0.0, both_sides=both_sides)
            found = difference(curved, *point, ALPHA, pi, last, shift).second_order(v)  # type: ignore[misc]
            errors.append(float((found - truth).abs().max()))
        for larger, smaller in itertools.pairwise(errors):
            assert smaller == pytest.approx(larger / 10**order, rel=0.5)
        assert errors[-1] < 1e-2 * truth.abs().max()


def test_a_shift_is_its_length_within_bounds() -> None:
    v = torch.tensor([[3.0, 4.0], [0.0, 0.5], [0.0, 0.0]])
    length = torch.full((3, 1), 0.1)
    assert Shift(length, 0.25).step(v, 0.2)[:2].flatten().tolist() == pytest.approx([0.05, 0.2])
    assert Shift(length, 0.25, most=0.5).step(v, 0.2)[:2].flatten().tolist() == pytest.approx([0.05, 0.1])
    nowhere = Shift(torch.zeros(3, 1), 0.25).step(v, 0.2)  # y = 0 has no length to go by
    assert nowhere.flatten().tolist() == pytest.approx([0.05] * 3)
    for k in range(3):  # from a client's own row alone
        assert torch.equal(Shift(length[[k]], 0.25).step(v[[k]], 0.2), Shift(length, 0.25).step(v, 0.2)[[k]])


def test_the_step_of_a_difference_is_alpha_without_a_shift(point: tuple[Tensor, Tensor]) -> None:
    (pi,) = batches(1)
    v = normal(M, Q, seed=3)
    size = v.norm(dim=1, keepdim=True)
    default = difference(curved, *point, ALPHA, pi, pi).second_order(v)  # type: ignore[misc]
    for shift, same in ((ALPHA * size, True), (3 * ALPHA * size, False)):
        found = difference(curved, *point, ALPHA, pi, pi, Shift(shift, 0.0)).second_order(v)  # type: ignore[misc]
        assert torch.allclose(found, default, rtol=1e-12, atol=1e-14) is same
    for both_sides in (False, True):
        shift = Shift(size, least=0.5, both_sides=both_sides)
        nothing = difference(curved, *point, ALPHA, pi, pi, shift).second_order(torch.zeros_like(v))  # type: ignore[misc]
        assert not nothing.any()


@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("kind", CONFIGS)
def test_difference_is_close_to_exact_on_a_transformer(kind: str) -> None:
    p = tiny_problem(kind)
    pi, xi = (p.source.draw([0, 1, 2], [i, i, i]) for i in (0, 1))
    errors = []
    for alpha in (1e-3, 1e-4):
        one, other = (bilevel(p.F, p.x, p.y, alpha, mode, pi, xi, xi, pi) for mode in ("exact", "difference"))
        assert one.share is not None
        errors.append(
            ((one.gradient - other.gradient).norm() / (one.share.mean() * one.gradient.norm())).item()
        )
    assert errors[1] < 0.15 * errors[0] < 0.05  # relative to the second-order term itself


@pytest.mark.parametrize("mode", ["exact", "difference"])
def test_a_smaller_zeta_is_some_rows_of_the_inner_batch(mode: str) -> None:
    p = regression_problem()
    pi, xi = (p.source.draw([0, 1, 2], [i] * 3) for i in range(2))
    method = PF2LoRA(
        p.layout, client_lr=1e-3 if mode == "difference" else ALPHA, hypergradient_mode=mode, zeta_size=2
    )
    state, _ = method.step(p.F, method.init(p.x, p.y), pi, xi)
    zeta_rows = {n: torch.cat([t[[4 * k, 4 * k + 3]] for k in range(3)]) for n, t in pi.tensors.items()}
    zeta = type(pi)(3, zeta_rows)
    expected = by_jacobians(p.F, p.x, p.y, method.rate, pi, xi, xi, zeta)
    assert (state.opt.mean / 0.1 - expected).abs().max() <= (1e-10 if mode == "exact" else 2e-6)
    whole = by_jacobians(p.F, p.x, p.y, method.rate, pi, xi, xi, pi)
    assert (whole - expected).abs().max() > 1e-5


@pytest.mark.parametrize("build", [regression_problem, lambda: tiny_problem("roberta", client_rank=0)])
def test_per_fedavg_equals_autodiff_of_the_adapted_loss(build: Callable[[], Problem]) -> None:
    """`x ↦ f_outer(x − α∇f_inner(x))`."""
    p = build()
    inner, outer = (p.source.draw([0, 1, 2], [i] * 3) for i in range(2))
    x_ = p.x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (g,) = torch.autograd.grad(p.F(x_, p.y, inner).sum(), x_, create_graph=True)
        (expected,) = torch.autograd.grad(p.F(x_ - ALPHA * g, p.y, outer).sum(), x_)
    method = PerFedAvg(p.layout, adaptation_lr=ALPHA, hypergradient_mode="exact")
    state, report = method.step(p.F, method.init(p.x, p.y), inner, outer)
    assert (state.opt.mean / 0.1 - expected).abs().max() <= 1e-10
    assert report.second_order is not None and (report.second_order > 1e-4).all()
    assert torch.equal(state.y, p.y)


def test_exact_without_client_adapters_has_no_second_order_term() -> None:
    p = regression_problem(client_rank=0)
    pi, xi = (p.source.draw([0, 1, 2], [i] * 3) for i in range(2))
    hyper = {
        mode: bilevel(p.F, p.x, p.y, ALPHA, mode, pi, xi, xi, pi) for mode in ("exact", "difference", "none")
    }
    assert torch.equal(hyper["exact"].gradient, hyper["none"].gradient)
    assert torch.equal(hyper["difference"].gradient, hyper["none"].gradient)
