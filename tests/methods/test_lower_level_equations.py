"""Each rule for the lower level is its equation, by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from lower_level_benchmark import (
    OWN,
    STEEP,
    batches,
    close,
    lower,
    made,
    norm,
    problem,
    rules,
    walk,
)
from torch import Tensor

from pf2lora.core.choice import Judge
from pf2lora.core.method import State
from pf2lora.core.optim import no_moments
from pf2lora.errors import UserError
from pf2lora.methods.own_size import ALPHA
from pf2lora.methods.pf2lora import PF2LoRA

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- the equations ----


def test_own_rate_steps_with_its_rates() -> None:
    p = problem()
    method = made(rules.OwnRate, p, lr=STEEP)
    s = method.init(p.x, p.y)
    assert torch.equal(s.opt.below[0], torch.full((3, 1), ALPHA, dtype=torch.float64))
    rates = torch.tensor([[0.001], [0.1], [1.0]]).double()
    s = s._replace(opt=s.opt._replace(below=(rates,)))
    drawn = batches(p, method)
    after = method.step(p.F, s, *drawn)[0]
    close(after.y, s.y - rates * lower(p, s, drawn[0])[1])
    assert torch.equal(after.opt.below[0], rates)


def sizes_wanted(s: State, D: Tensor, wanted: list[float]) -> Judge:
    """Client k's loss at D = λD_k is (λ − wanted_k)²."""

    def judge(x: Tensor, y: Tensor) -> Tensor:
        size = (y * s.y)[:, D].sum(1) / s.y[:, D].square().sum(1).clamp_min(1e-30)
        return (size - torch.tensor(wanted).to(size)).square().unsqueeze(1).expand(-1, 4)

    return judge


def own_rate_states(clients: int, rate: float = ALPHA, **options: Any) -> tuple[rules.OwnRate, State, Tensor]:
    p = problem()
    method = made(rules.OwnRate, p, **options)
    y = torch.randn(clients, OWN.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = method.init(torch.zeros(clients, p.x.shape[1], dtype=torch.float64), y)
    rates = torch.full((clients, 1), rate, dtype=torch.float64)
    return method, s._replace(opt=s.opt._replace(below=(rates,))), method.sized(y)  # type: ignore[return-value]


def test_a_rate_follows_the_size_that_is_chosen() -> None:
    wanted, times = [0.0, 0.6, 1.0, 1.4, -2.0, 1.0], [0.7, 0.85, 1.0, 1.2, 0.7, 1.0]
    method, s, D = own_rate_states(6)
    s.y[5, D] = 0  # there is nothing to size
    judge = sizes_wanted(s, D, wanted)
    after = method.resize(s, judge)
    close(after.opt.below[0].flatten(), ALPHA * torch.tensor(times).double(), 1e-8)
    plain = PF2LoRA.resize(method, s, judge)
    assert torch.equal(after.y, plain.y) and after.opt.above is s.opt.above
    uncut, t, _ = own_rate_states(6, rescale="served")
    t = t._replace(y=s.y)
    assert torch.equal(uncut.resize(t, judge).y, s.y)
    assert torch.equal(uncut.resize(t, judge).opt.below[0], after.opt.below[0])
    for m in (method, uncut):  # what is served is sized, and leaves the rate as it is
        served = m.resize(s, judge, serving=True)
        assert torch.equal(served.opt.below[0], s.opt.below[0])
        assert torch.equal(served.y, PF2LoRA.resize(m, s, judge, serving=True).y)


def test_a_rate_has_bounds() -> None:
    method, s, D = own_rate_states(2)
    for _ in range(60):
        sized = method.resize(s, sizes_wanted(s, D, [0.0, 1.4]))
        assert (sized.opt.below[0] >= ALPHA / 100).all() and (sized.opt.below[0] <= ALPHA * 10).all()
        s = s._replace(opt=sized.opt)
    close(s.opt.below[0].flatten(), torch.tensor([ALPHA / 100, ALPHA * 10], dtype=torch.float64), 1e-15)


@pytest.mark.parametrize("c", [0.3, 1.0])
def test_cumulative_norm(c: float) -> None:
    """α_t = c η √Q / √(Σ‖g‖²), which is never more than ten times ALPHA."""
    p = problem()
    method = made(rules.CumulativeNorm, p, c=c)
    walked, total = walk(method, p, 4), torch.zeros(3, 1).double()
    for (s, _, g), (after, *_) in pairwise(walked):
        total = total + g.square().sum(1, keepdim=True)
        alpha = c * 0.01 * OWN.size**0.5 / total.sqrt()
        assert (alpha < 10 * ALPHA).all()
        close(after.y, s.y - alpha * g)
        close(after.opt.below[0], total)
    steep = made(rules.CumulativeNorm, p, lr=STEEP)
    (s, _, g), (after, *_) = walk(steep, p, 1)
    close(after.y, s.y - 10 * ALPHA * g)


def test_capped_polyak() -> None:
    """α = min(most, F / ‖g‖²): some clients are at the cap, others below it."""
    p = problem()
    (s, loss, g), _ = walk(made(rules.CappedPolyak, p, lr=STEEP), p, 1)
    polyak = loss / g.square().sum(1, keepdim=True)
    most = float(polyak.median())
    after = walk(made(rules.CappedPolyak, p, lr=STEEP, most=most), p, 1)[-1][0]
    assert 0 < (polyak > most).sum() < 3
    close(after.y, s.y - polyak.clamp_max(most) * g)


def test_adam_below_is_torchs_adam_and_decay() -> None:
    """Client by client, as torch.optim has it; D is then divided by 1 + decay·η."""
    p, decay, kappa, lr = problem(), 3.0, 0.5, 0.01
    method = made(rules.AdamBelow, p, kappa=kappa, decay=decay, lr=lr)
    walked = walk(method, p, 4)
    parameter = torch.nn.Parameter(p.y.clone())
    adam = torch.optim.Adam([parameter], lr=kappa * lr)
    D = method.sized(p.y)
    assert 0 < D.sum() < len(D)
    for (_, _, g), (after, *_) in pairwise(walked):
        parameter.grad = g
        adam.step()
        with torch.no_grad():
            parameter[:, D] /= 1 + decay * lr
        close(after.y, parameter.detach())
    rate = method.descent(rules.Lower(p.x[:, 0], walked[0][2], None), p.y, no_moments(p.y)).slope
    g = walked[0][2]
    close(
        rate, kappa * lr / (g.abs() + 1e-8), 1e-10
    )  # the first step: m̂ = g and √v̂ = |g|; (1 − β₁) / (1 − β₁) = 1


def test_prodigy_is_its_algorithm() -> None:
    """Algorithm 4 by hand, one client at a time; d grows, and stops at the longest step per number."""
    p, lr = problem(), 0.02
    walked = walk(made(rules.ProdigyBelow, p, d0=1e-3, lr=lr), p, 60)
    root, ds = 0.999**0.5, []
    for k in range(3):
        m = v = s = torch.zeros(OWN.size).double()
        r, d, y = 0.0, 1e-3, p.y[k]
        for (_, _, g), (after, *_) in pairwise(walked):
            m = 0.9 * m + 0.1 * d * g[k]
            v = 0.999 * v + 0.001 * d * d * g[k] ** 2
            r = root * r + (1 - root) * d * d * float(g[k] @ (p.y[k] - y))
            s = root * s + (1 - root) * d * d * g[k]
            step = d * m / (v.sqrt() + 1e-8 * d)
            y = y - min(1.0, lr * OWN.size**0.5 / float(step.norm())) * step
            d = max(d, min(lr, r / float(s.abs().sum())))
            close(after.y[k], y, 1e-9)
            assert float(after.opt.below.d[k]) == pytest.approx(d, rel=1e-7)
        ds.append(d)
    assert max(ds) > 1e-3
    kept = torch.stack([state.opt.below.d for state, *_ in walked]).squeeze(2)
    assert (kept[1:] >= kept[:-1]).all() and (kept <= lr).all()
    small = walk(made(rules.ProdigyBelow, p, lr=2e-3, d0=1e-3), p, 60)[-1][0]
    assert float(small.opt.below.d.max()) == 2e-3


def test_decay_shrinks_d_alone() -> None:
    p = problem()
    (s, _, g), (after, *_) = walk(made(rules.Decay, p, lr=STEEP, decay=7 / STEEP), p, 1)
    D = made(rules.Decay, p).sized(p.y)
    plain = s.y - ALPHA * g
    close(after.y, torch.where(D, plain / 8, plain))


def test_lower_steps_after_the_average() -> None:
    """The first step of a round does `extra` of them on its own batch, the others none; so does what is served."""
    p = problem()
    method, plain = made(rules.LowerAfter, p, extra=3), made(rules.Rule, p)
    s = method.init(p.x, p.y)
    drawn = batches(p, method)
    again = walk(plain, p, 1)[-1][0]
    assert torch.equal(method.step(p.F, s, *drawn)[0].y, again.y)  # no average came back yet
    assert torch.equal(method.personal(p.F, s, drawn[0])[1], s.y)
    back = method.receive(s, s.x[0, : p.layout.shared] + 0.1, 1)
    y = back.y
    for _ in range(3):
        g = lower(p, back._replace(y=y), drawn[0])[1]
        y = y - rules.shortened(ALPHA * g, norm(g) * 0 + 0.01 * OWN.size**0.5) * ALPHA * g
    x, personal = method.personal(p.F, back, drawn[0])
    close(personal, y)
    assert torch.equal(x, back.x)
    after, _ = method.step(p.F, back, *drawn)
    moved = plain.init(back.x, y)
    close(after.y, plain.step(p.F, moved, *drawn)[0].y)
    assert not after.opt.below[0].any() and back.opt.below[0].all()


@pytest.mark.parametrize("rescale", rules.RESCALED)
def test_when_d_is_rescaled(rescale: str) -> None:
    p = problem()
    method = made(rules.Rule, p, rescale=rescale)
    s = method.init(p.x, p.y)
    nothing: Judge = lambda x, y: y.square().sum(1, keepdim=True).expand(-1, 3)  # noqa: E731
    assert method.resizes == (rescale != "never")
    assert method.longest(p.y) is not None
    assert (method.resize(s, nothing).y != s.y).any() == (rescale == "always")
    if rescale != "never":
        assert not method.resize(s, nothing, serving=True).y.any()
    assert made(rules.Rule, p, client_lr=0.1).longest(p.y) is None
    with pytest.raises(UserError, match="sometimes"):
        made(rules.Rule, p, rescale="sometimes")


def test_seldom_sized_means_after_so_many_steps() -> None:
    p = problem()
    method = made(rules.Seldom, p, between=40)
    rows = Fraction(4)
    assert [done for done in range(0, 130, 10) if method.resizes_before(done, 10, rows)] == [40, 80, 120]
    assert [done for done in range(0, 400, 100) if method.resizes_before(done, 100, rows)] == [100, 200, 300]
    assert not made(rules.Seldom, p, rescale="never").resizes_before(40, 10, rows)
    always = made(rules.Seldom, p, between=1)
    assert [done for done in range(0, 40, 10) if always.resizes_before(done, 10, rows)] == [10, 20, 30]
