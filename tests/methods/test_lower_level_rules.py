"""The rules for the lower level that `benchmarks/lower_level.py` tries: each is its equation, and can be trained."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from little_world import World, make_world
from tiny import Problem, regression_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pf2lora.adapters.two_level import factor_entries
from pf2lora.core.layout import Layout
from pf2lora.core.method import Judge, State, over_tensors, take
from pf2lora.core.optim import no_moments
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods import own_size
from pf2lora.methods.own_size import ALPHA, LONGEST
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run.comparison import Watcher, prepare, run_together
from pf2lora.run.config import from_settings
from pf2lora.run.set_up import set_up

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)  # as `python benchmarks/lower_level.py` finds them
import lower_level  # noqa: E402
import lower_level_rules as rules  # noqa: E402

sys.path.remove(BENCHMARKS)

pytestmark = pytest.mark.usefixtures("one_thread")
ALL, STEEP = [0, 1, 2], 10.0  # a rate of x at which no step of y is cut
KINDS: list[type[rules.Rule]] = [
    rules.Rule,
    rules.OwnRate,
    rules.CumulativeNorm,
    rules.CappedPolyak,
    rules.AdamBelow,
    rules.ProdigyBelow,
    rules.LowerAfter,
    rules.Decay,
]
MODES = ("exact", "difference", "none")
OWN = Layout(tuple(factor_entries({f"w{i}": (5, 6) for i in range(2)}, "C", "D", 2)), 0)


def problem() -> Problem:
    p = regression_problem()
    assert p.y.shape[1] == OWN.size
    return p


def made(kind: type[rules.Rule], p: Problem, **options: Any) -> rules.Rule:
    defaults: dict[str, Any] = {"personal_layout": OWN, "hypergradient_mode": "none", "lr": 0.01}
    return kind(p.layout, **defaults | options)


def batches(p: Problem, method: PF2LoRA, number: int = 0) -> list[Any]:
    return [p.source.draw(ALL, [method.draws * number + i] * 3) for i in range(method.draws)]


def lower(p: Problem, s: State, batch: Any) -> tuple[Tensor, Tensor]:
    """F(x, y; π) and ∇_y F, as columns and rows."""
    y_ = s.y.clone().requires_grad_()
    loss = p.F(s.x, y_, batch)
    return loss.detach().unsqueeze(1), torch.autograd.grad(loss.sum(), y_)[0]


def walk(method: rules.Rule, p: Problem, steps: int) -> list[tuple[State, Tensor, Tensor]]:
    """The states, each with F and ∇_y F at π; the last has none after it."""
    s, found = method.init(p.x, p.y), []
    for i in range(steps):
        drawn = batches(p, method, i)
        found.append((s, *lower(p, s, drawn[0])))
        s = method.step(p.F, s, *drawn)[0]
    return [*found, (s, torch.empty(0), torch.empty(0))]


def same(found: Any, expected: Any, atol: float = 1e-13) -> None:
    """Every tensor of nested tuples."""
    if isinstance(found, Tensor):
        close(found, expected, atol)
        return
    for a, b in zip(found, expected, strict=True):
        same(a, b, atol)


def close(found: Tensor, expected: Tensor, atol: float = 1e-13) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def norm(rows: Tensor) -> Tensor:
    return rows.norm(dim=1, keepdim=True)


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
    assert ours.variants_for_round(s)[0] == ours


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
    back = method.receive(s, s.x[0, : p.layout.shared] + 0.1)
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


# ---- runs ----


def trained(method: rules.Rule, p: Problem, clients: list[int], rounds: int = 3) -> list[Round]:
    """Some of the problem's clients, who judge by other rows."""

    def judges(some: Any) -> Judge:
        whose = [clients[i] for i in some]
        rows = p.source.draw(whose, [1000] * len(whose))
        return lambda x, y: p.F(x, y, rows).unsqueeze(1)

    source: Any = SimpleNamespace(
        names=[p.source.names[k] for k in clients],
        sizes=[p.source.sizes[k] for k in clients],
        draw=lambda some, numbers: p.source.draw([clients[i] for i in some], numbers),
    )
    state = take(method.init(p.x, p.y), clients)
    schedule = Schedule(rounds=rounds, steps=2)
    return [d.kept() for d in train(method, p.F, state, source, schedule, judges=judges)]


@pytest.mark.parametrize("mode", ["none", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_does_not_notice_who_trains_beside_it(kind: type[rules.Rule], mode: str) -> None:
    """In the first round, and what it keeps; with the average it hears of the others."""
    p = problem()
    method = made(kind, p, hypergradient_mode=mode)
    together = trained(method, p, ALL)
    assert torch.isfinite(torch.stack([done.stats.loss for done in together])).all()
    assert together[-1].stats.loss.mean() < together[0].stats.loss[0].mean()
    for k in ALL:
        alone = trained(method, p, [k], rounds=1)
        same(take(together[0].before, [k]), alone[0].before)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_in_one_pass_are_the_seeds_one_by_one(kind: type[rules.Rule], world: World) -> None:
    """Whole runs of the method by its name, with validation rows and what clients deploy; in float32."""
    name = f"lower_level_rules:{kind.__name__}"
    settings = world.settings(
        method=[name], seeds=2, client_lr="auto", validation_ratio=0.2, hypergradient_mode="none"
    )
    workload = prepare(from_settings(settings))
    together = run_together(workload, name, (0, 1), Watcher())
    together[0].model.remove()
    for outcome in together:
        (alone,) = run_together(workload, name, (outcome.record.seed,), Watcher())
        alone.model.remove()
        assert all(loss is not None for r in outcome.record.rounds for loss in r.train_loss)
        for a, b in zip(outcome.record.rounds, alone.record.rounds, strict=True):
            assert a.train_loss == pytest.approx(b.train_loss, abs=1e-4)
            assert a.validation_loss == pytest.approx(b.validation_loss, abs=1e-4)
        torch.testing.assert_close(outcome.personal_of_client, alone.personal_of_client, atol=1e-4, rtol=1e-3)
        assert torch.isfinite(outcome.personal_of_client).all()


# ---- the script ----


def test_every_rule_can_be_set_up_with_what_it_says(world: World) -> None:
    """By its settings, as the script builds them: they reach the method, and its adapter has a bias where it should."""
    shared = world.settings(validation_ratio=0.2, client_lr="auto", hypergradient_mode="none") | {"rank": 8}
    workload = prepare(from_settings(shared | {"method": ["pf2lora"]}))
    for rule, (own, values) in lower_level.RULES.items():
        config = from_settings(shared | {"method": ["pf2lora"]} | own, rule)
        with patch.multiple(own_size, **{"ALPHA": ALPHA} | values):
            trial = set_up(
                type(workload)(**vars(workload) | {"config": config}), config.training.method[0], 0
            )
            trial.model.remove()
            method: Any = trial.method
            if isinstance(method, PF2LoRA):
                assert method.hypergradient_mode == "none"
                assert method.rate == values.get("ALPHA", own.get("client_lr", ALPHA))
                biased = any(e.kind == "head" for e in trial.model.personal_layout.entries)
                assert biased == (rule not in ("no bias", "fixed 0.03"))
        for table in own.get("methods", {}).values():
            assert type(method).__module__ == "lower_level_rules"
            assert {key: getattr(method, key) for key in table} == table
    assert {type_ for type_, _ in map(rule_kind, lower_level.RULES)} >= {k.__name__ for k in KINDS}


def rule_kind(rule: str) -> tuple[str, str]:
    return lower_level.RULES[rule][0].get("method", [""])[0].rpartition(":")[2], rule


def line(rule: str, task: str, served: list[Any], deploy: list[Any]) -> dict[str, Any]:
    return {"rule": rule, "task": task, "served": served, "deploy": deploy}


LINES = [
    line("a", "t", [90.0, 92.0], [91.0, 91.0]),
    line("a", "u", [40.0], [50.0]),
    line("b", "t", [70.0], [70.0]),  # run again below
    line("b", "t", [90.5, 90.5], [95.0, 95.0]),
    line("b", "u", [42.0, 42.0], [50.0, 49.0]),
    line("part", "u", [60.0], [40.0]),
    {"rule": "broken", "task": "t", "broke": "no number"},
    line("broken", "u", [None, 50.0], [1.0, 1.0]),
]


def test_rules_are_sorted_by_regret() -> None:
    rows = lower_level.compared(LINES, "served")
    assert [row.rule for row in rows] == ["b", "a", "broken", "part"]  # the last has one task alone
    first = asdict_row(rows[0])
    assert first == {"t": (90.5, 0.5), "u": (42.0, 18.0)} and rows[0].regret == 18 and rows[0].mean == 9.25
    assert rows[1].scores["t"] == (91.0, pytest.approx(2**0.5)) and rows[1].regret == 20
    assert rows[2].regret == float("inf") and rows[3].regret == 0


def asdict_row(row: Any) -> dict[str, tuple[float, float]]:
    return {task: (row.scores[task][0], row.behind[task]) for task in row.scores}


def test_the_tables_are_read_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("".join(json.dumps(found) + "\n" for found in LINES[:4]), encoding="utf8")
    files[1].write_text(
        "".join(json.dumps(found) + "\n" for found in LINES[4:]) + '{"rule": "c', encoding="utf8"
    )
    lower_level.main(["--read", *map(str, files)])
    out = capsys.readouterr().out
    served, deploy = out.split("\n\n")
    assert "left out" in served and "90.5±0.0 -0.5" in served and "91.0±1.4 best" in served
    assert "broke" in served
    assert deploy.splitlines()[1].split() == ["b", "0.5", "0.2", "95.0±0.0", "best", "49.5±0.7", "-0.5"]
    lower_level.main(["--list"])
    shown = capsys.readouterr().out
    assert all(rule in shown for rule in lower_level.RULES) and "cola 0.9, sst2 0.3" in shown
    with pytest.raises(SystemExit):
        lower_level.main([])


def test_a_line_for_every_run_and_one_that_breaks_ends_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clients = [str(path) for path in world.clients]
    small: dict[str, Any] = {"clients": clients, "rounds": 2, "device": "cpu"}
    tasks = {"first": small, "cola 0.9": small}
    monkeypatch.setattr(lower_level, "tasks", lambda data, work: tasks)
    monkeypatch.setitem(lower_level.RULES, "breaks", ({"client_lr": 1e30}, {}))
    out = tmp_path / "out.jsonl"
    flags = ["--model", str(world.model), "--out", str(out), "--seeds", "1", "--every", "1"]
    lower_level.main([*flags, "--rules", "homlora", "breaks", "own rate"])
    found = [json.loads(text) for text in out.read_text(encoding="utf8").splitlines()]
    assert [(f["task"], f["rule"]) for f in found] == [
        ("first", r) for r in ("homlora", "breaks", "own rate")
    ]
    assert "became" in found[1]["broke"] and "served" not in found[1]
    assert all(len(f["served"]) == len(f["deploy"]) == 1 for f in (found[0], found[2]))
    shown = capsys.readouterr().out
    assert shown.count("regret") == 2 and "own rate" in shown.split("regret")[-1]
    with pytest.raises(SystemExit, match=r"cola 0\.9"):
        lower_level.main([*flags, "--tasks", "cola"])
