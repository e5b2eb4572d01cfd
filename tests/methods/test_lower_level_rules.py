"""The rules for the lower level that `benchmarks/lower_level.py` tries: what all of them keep to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from lower_level_benchmark import (
    KINDS,
    MODES,
    OWN,
    STEEP,
    batches,
    close,
    made,
    norm,
    problem,
    rules,
    same,
    walk,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pf2lora.core.method import over_tensors
from pf2lora.methods.own_size import LONGEST
from pf2lora.methods.pf2lora import PF2LoRA

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- the step that all share ----


@pytest.mark.parametrize("lr", [STEEP, 1e-3])
@pytest.mark.parametrize("options", [{}, {"batches": 4}, {"zeta_size": 2}])
@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_the_first_rule_is_pf2lora(mode: str, options: dict[str, Any], lr: float) -> None:
    """Where its step is cut, and where not; with what `auto` watches."""
    p = problem()
    shared: dict[str, Any] = {"lr": lr, "hypergradient_mode": mode} | options
    ours, plain = made(rules.Rule, p, **shared), PF2LoRA(p.layout, personal_layout=OWN, **shared)
    s, expected = ours.init(p.x, p.y), plain.init(p.x, p.y)
    # The shift of `difference` goes by α, before it is cut or after.
    atol, shares = (1e-6, 1e-5) if mode in ("difference", "auto") else (1e-12, 1e-10)
    for i in range(2):
        (s, stats), (expected, wanted) = (
            m.step(p.F, t, *batches(p, plain, i)) for m, t in ((ours, s), (plain, expected))
        )
        same(s.y, expected.y, atol)
        same(s.opt.above, expected.opt, shares)
        same(stats.loss, wanted.loss, atol)
        assert (stats.second_order is None) == (wanted.second_order is None) == (mode == "none")
        if stats.second_order is not None and wanted.second_order is not None:
            assert stats.second_order.min() > 0
            same(stats.second_order, wanted.second_order, shares)
        s, expected = s._replace(x=p.x), expected._replace(x=p.x, y=s.y)
    assert ours.variants_for_round(s, 1)[0] == ours


@pytest.mark.parametrize("mode", ["exact", "difference"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_order_term_is_the_steps_derivative(kind: type[rules.Rule], mode: str) -> None:
    """x's gradient is that of F(x, y⁺(x)), with what a rule makes of earlier gradients held still: for SGD and a rate
    that is kept it is the derivative by autograd."""
    p = problem()
    method = made(kind, p, lr=0.05, hypergradient_mode=mode, decay=3.0, weight_decay=0.0)
    s = method.init(p.x, p.y)
    if kind is rules.ProdigyBelow:  # a step that can be seen
        s = s._replace(opt=s.opt._replace(below=s.opt.below._replace(d=torch.full((3, 1), 0.01).double())))
    pi, xi = batches(p, method)
    after = method.step(p.F, s, pi, xi)[0]
    x_, y_ = s.x.clone().requires_grad_(), s.y.clone().requires_grad_()
    (g,) = torch.autograd.grad(p.F(x_, y_, pi).sum(), y_, create_graph=True)
    found = rules.Lower(p.F(s.x, s.y, pi), g.detach(), None)
    y_next, slope = method.lowered(s.y, method.descent(found, s.y, s.opt.below))
    close(after.y, y_next)
    moving = y_next + slope * (g.detach() - g)  # y⁺, whose derivative is −slope ∇_xy
    (expected,) = torch.autograd.grad(p.F(x_, moving, xi).sum(), x_)
    (without,) = torch.autograd.grad(p.F(x_, y_next, xi).sum(), x_)
    second, off = norm(without - expected), norm(10 * after.opt.above.mean - expected)
    assert (second > 1e-4).all() and (off < (1e-10 if mode == "exact" else 1e-2) * second).all()


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_longer_than_the_longest(kind: type[rules.Rule], scale: float) -> None:
    p = problem()
    steep = p._replace(F=lambda x, y, batch: scale * p.F(x, y, batch))
    for lr in (1e-4, 1e-2):
        method = made(kind, p, lr=lr, decay=0.0)
        states = [s for s, *_ in walk(method, steep, 3)]
        for s, after in pairwise(states):
            assert torch.isfinite(after.y).all()
            assert (norm(after.y - s.y) <= LONGEST * lr * OWN.size**0.5 * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_nothing_moves_but_what_decays(kind: type[rules.Rule]) -> None:
    p = problem()
    flat = p._replace(F=lambda x, y, batch: 0 * p.F(x, y, batch))
    for mode in MODES:
        method = made(kind, p, hypergradient_mode=mode, decay=2.0)
        last = walk(method, flat, 2)[-1][0]
        D = method.sized(p.y)
        close(last.y, torch.where(D, p.y / 1.02**2, p.y))
        over_tensors(lambda t: finite(t), last)


def finite(tensor: Tensor) -> Tensor:
    assert torch.isfinite(tensor).all()
    return tensor


class NoHost(TorchDispatchMode):
    """What a CUDA graph cannot record: a number that is asked for, or copied from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "lift_fresh", "item"), name
        assert name != "where" or all(t.dim() for t in args[1:]), "a number in torch.where"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_asks_the_host_nothing(kind: type[rules.Rule], mode: str) -> None:
    p = problem()
    method = made(kind, p, hypergradient_mode=mode, decay=1.0)
    s = method.init(p.x, p.y)
    for i in range(2):
        drawn = batches(p, method, i)
        with NoHost():
            s = method.step(p.F, s, *drawn)[0]


def test_the_host_is_noticed() -> None:
    mask = torch.tensor([True, False])
    for ask in (lambda: bool(mask[0]), lambda: torch.where(mask, 1.0, 0.0), lambda: torch.tensor([1.0])):
        with pytest.raises(AssertionError), NoHost():
            ask()
