"""`client_lr = "auto"`: steps of y that are never too long, and a D of the size that the client's own rows ask for."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from tiny import Problem, regression_problem
from torch import Tensor

from pf2lora.core.choice import Judge
from pf2lora.core.layout import Entry, Layout
from pf2lora.core.method import State, Surroundings
from pf2lora.engines.batches import Batch
from pf2lora.methods.newcomer import Newcomer
from pf2lora.methods.own_size import ALPHA, FIXED, LARGER, LONGEST, NONE, SMALLER, OwnSize
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.methods.pf2lora_joint import PF2LoRAJoint

ALL = [0, 1, 2]
KINDS: list[tuple[type[OwnSize], dict[str, Any]]] = [
    *((PF2LoRA, {"hypergradient_mode": mode}) for mode in ("exact", "difference", "none")),
    (PF2LoRA, {"hypergradient_mode": "exact", "batches": 4}),
    (PF2LoRAJoint, {}),
    (Newcomer, {}),
]
IDS = ["exact", "difference", "none", "four", "joint", "newcomer"]


def step(method: OwnSize, p: Problem, start: int = 0) -> State:
    batches = [p.source.draw(ALL, [start + i] * 3) for i in range(method.draws)]
    return method.step(p.F, method.init(p.x, p.y), *batches)[0]


def lower_gradient(p: Problem, batch: Batch) -> Tensor:
    y_ = p.y.clone().requires_grad_()
    return torch.autograd.grad(p.F(p.x, y_, batch).sum(), y_)[0]


# ---- the step ----


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_a_short_step_is_sgd_with_the_rate_of_auto(kind: type[OwnSize], options: dict[str, Any]) -> None:
    """Where it is not longer than it may be, auto is α = ALPHA bit for bit: y, x and the moments."""
    p = regression_problem()
    auto, plain = (step(kind(p.layout, lr=10.0, client_lr=rate, **options), p) for rate in ("auto", ALPHA))
    for a, b in ((auto.x, plain.x), (auto.y, plain.y), (auto.opt.mean, plain.opt.mean)):
        assert torch.equal(a, b)
    expected = p.y - ALPHA * lower_gradient(p, p.source.draw(ALL, [0] * 3))
    torch.testing.assert_close(auto.y, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_a_long_step_is_cut_and_so_is_its_second_order_term(
    kind: type[OwnSize], options: dict[str, Any]
) -> None:
    """By the equation: α_k = η √Q / ‖∇_y F_k‖ where that is below ALPHA, and every client has the step of its α_k."""
    p, lr = regression_problem(), 1e-3
    gradient = lower_gradient(p, p.source.draw(ALL, [0] * 3))
    alphas = (LONGEST * lr * math.sqrt(p.y.shape[1]) / gradient.norm(dim=1)).clamp_max(ALPHA).tolist()
    assert max(alphas) < ALPHA
    auto = step(kind(p.layout, lr=lr, client_lr="auto", **options), p)
    for k, alpha in enumerate(alphas):
        plain = step(kind(p.layout, lr=lr, client_lr=alpha, **options), p)
        torch.testing.assert_close(auto.y[k], plain.y[k], rtol=0, atol=1e-14)
        close = 1e-7 if options.get("hypergradient_mode") == "difference" else 1e-13  # its shift goes by α
        torch.testing.assert_close(auto.opt.mean[k], plain.opt.mean[k], rtol=0, atol=close)
    if options.get("hypergradient_mode") in ("exact", "difference"):
        whole = step(kind(p.layout, lr=lr, client_lr=ALPHA, **options), p)
        assert (whole.opt.mean - auto.opt.mean).abs().max() > 1e-6
    torch.testing.assert_close(
        (auto.y - p.y).norm(dim=1), torch.full((3,), lr * p.y.shape[1] ** 0.5).double()
    )


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e9])
def test_no_step_is_longer_than_the_longest(
    kind: type[OwnSize], options: dict[str, Any], scale: float
) -> None:
    p = regression_problem()
    steep = p._replace(F=lambda x, y, batch: scale * p.F(x, y, batch))
    for lr in (1e-4, 1e-2, 1.0):
        method = kind(p.layout, lr=lr, client_lr="auto", **options)
        bound = method.longest(p.y)
        assert bound is not None and bound.shape == (3, 1)
        moved = (step(method, steep).y - p.y).norm(dim=1, keepdim=True)
        assert (moved <= bound * (1 + 1e-12)).all() and (moved > 0).all()


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_a_fixed_rate_is_the_papers_step(kind: type[OwnSize], options: dict[str, Any]) -> None:
    """Bit for bit, however long it is; and nothing is resized."""
    p = regression_problem()
    method = kind(p.layout, lr=1e-6, client_lr=7.0, **options)
    assert method.longest(p.y) is None and not method.resizes and method.rate == 7.0
    y_ = p.y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(p.F(p.x, y_, p.source.draw(ALL, [0] * 3)).sum(), y_)
    assert torch.equal(step(method, p).y, p.y - 7.0 * gradient)


# ---- set up ----


@pytest.mark.parametrize("kind", [PF2LoRA, PF2LoRAJoint, Newcomer])
def test_without_validation_rows_auto_is_a_fixed_rate(kind: type[OwnSize]) -> None:
    layout = regression_problem().layout
    own = Layout((Entry("w", "D", (2, 3)),), 0)
    blind, sighted = (
        Surroundings(layout, 4, 3, (0, 1, 2), personal_layout=own, validated=(known,) * 3)
        for known in (False, True)
    )
    found = kind.set_up(blind, {"client_lr": "auto", "lr": 0.3})
    assert (found.client_lr, found.resizes, found.rate, found.lr) == (FIXED, False, FIXED, 0.3)
    found = kind.set_up(sighted, {"client_lr": "auto", "lr": 0.3})
    assert (found.client_lr, found.resizes, found.rate, found.lr) == ("auto", True, ALPHA, 0.3)
    assert found.personal_layout == own and found.layout == layout
    for run in (blind, sighted):
        assert kind.set_up(run, {"client_lr": 0.5}).client_lr == 0.5


@pytest.mark.parametrize("kind", [PF2LoRA, PF2LoRAJoint])
def test_who_has_no_validation_rows_steps_at_the_fixed_rate(kind: type[OwnSize]) -> None:
    """Beside clients that have some, as alone: no step is shortened, whatever α the others have."""
    p = regression_problem()
    run = Surroundings(p.layout, 4, 3, (0, 1, 2), validated=(True, False, True))
    alone = Surroundings(p.layout, 4, 3, (1,), validated=(False,))
    settings = {"client_lr": "auto", "lr": 1e-6}
    method, fixed = kind.set_up(run, settings), kind.set_up(alone, settings)
    first, without, last = method.variants_for_round(method.init(p.x, p.y), 1)
    assert first == last == method and method.resizes
    assert (without.client_lr, without.longest(p.y)) == (FIXED, None)  # type: ignore[attr-defined]
    assert torch.equal(step(without, p).y, step(fixed, p).y)  # type: ignore[arg-type]
    assert (step(without, p).y != step(method, p).y).any()  # type: ignore[arg-type]


# ---- the size ----

OWN = Layout((Entry("w", "C", (2, 3)), Entry("w", "D", (4, 2)), Entry("head", "head", (3,), "bias")), 0)
C, D, BIAS = slice(0, 6), slice(6, 14), slice(14, 17)


def sized_method() -> PF2LoRA:
    return PF2LoRA(regression_problem().layout, client_lr="auto", personal_layout=OWN)


def some_state(clients: int, seed: int = 0) -> State:
    random = torch.Generator().manual_seed(seed)
    y = torch.randn(clients, OWN.size, generator=random, dtype=torch.float64)
    return State(torch.zeros(clients, 5, dtype=torch.float64), y, ())


def quadratic(y: Tensor, wanted: list[float], noise: float = 0.0, rows: int = 6) -> Judge:
    """Client k's loss at D = λD_k is (λ − wanted_k)² on every row, but for noise that each row has of its own."""
    random = torch.Generator().manual_seed(1)
    slopes = noise * torch.randn(len(y), rows, generator=random, dtype=y.dtype)

    def judge(x: Tensor, tried: Tensor) -> Tensor:
        size = (tried[:, D] * y[:, D]).sum(1) / y[:, D].square().sum(1)
        squares = (size - torch.tensor(wanted).to(y)).square()
        return squares.unsqueeze(1) + slopes * size.unsqueeze(1)

    return judge


def test_the_size_with_the_least_loss_is_taken_and_multiplies_d_alone() -> None:
    wanted = [0.05, 0.55, 1.1, 1.5, -3.0, 9.0]
    expected = [0.0, 0.6, 1.0, 1.4, 0.0, 1.4]
    assert set(expected) == {NONE, SMALLER, 1.0, LARGER}
    s = some_state(len(wanted))
    found = sized_method().resize(s, quadratic(s.y, wanted))
    factor = torch.tensor(expected, dtype=s.y.dtype).unsqueeze(1)
    assert torch.equal(found.y[:, D], factor * s.y[:, D])
    assert torch.equal(found.y[:, C], s.y[:, C]) and torch.equal(found.y[:, BIAS], s.y[:, BIAS])
    assert found.x is s.x and found.opt is s.opt


def test_the_other_side_of_the_valley_is_not_asked() -> None:
    """Who is no worse off with a smaller D tries none, who is tries a larger one; all in the same three passes."""
    s = some_state(3)
    asked: list[list[float]] = []
    loss = quadratic(s.y, [0.0, 1.0, 0.8])  # the third is as well off with 0.6 as with 1

    def judge(x: Tensor, y: Tensor) -> Tensor:
        asked.append(((y[:, D] * s.y[:, D]).sum(1) / s.y[:, D].square().sum(1)).tolist())
        return loss(x, y).round(decimals=6)

    sized_method().resize(s, judge)
    assert [[round(size, 9) for size in sizes] for sizes in asked] == [
        [1.0, 1.0, 1.0],
        [SMALLER] * 3,
        [NONE, LARGER, NONE],
    ]
    asked.clear()
    sized_method().resize(s, judge, serving=True)
    assert len(asked) == 4 and not any(asked[3])
    assert len(asked) == PF2LoRA.resize_passes({}, serving=True) == PF2LoRA.resize_passes({}) + 1


def rounds_with_a_resizing(
    kind: type[OwnSize], steps: int, batches: Fraction, rounds: int = 400
) -> list[int]:
    method = kind(regression_problem().layout, client_lr="auto", personal_layout=OWN)
    return [
        number
        for number in range(1, rounds + 1)
        if method.resizes_before((number - 1) * steps, steps, batches)
    ]


def test_few_rows_are_asked_before_every_round_and_many_less_often() -> None:
    """Batches of 16: 3 passes over 64 rows are 192, 20 times as many rows are those of 26.7 steps of 9 · 16."""
    many, few = Fraction(64, 16), Fraction(20, 16)
    between = 20 * 3 * 64 / (3 * 3 * 16)  # 26.7 steps
    assert float(PF2LoRA.steps_between(many)) == pytest.approx(between)
    assert rounds_with_a_resizing(PF2LoRA, 10, many, 12) == [4, 7, 9, 12]
    assert rounds_with_a_resizing(PF2LoRA, 10, few, 12) == [*range(2, 13)]
    assert rounds_with_a_resizing(PF2LoRA, 100, many, 5) == [2, 3, 4, 5]
    assert rounds_with_a_resizing(PF2LoRA, 10, Fraction(0)) == []  # nobody to ask
    fixed = PF2LoRA(regression_problem().layout, client_lr=0.1, personal_layout=OWN)
    assert not fixed.resizes_before(30, 10, many)


@pytest.mark.parametrize("kind", [PF2LoRA, PF2LoRAJoint])
@pytest.mark.parametrize("batches", [Fraction(1, 3), Fraction(5, 4), Fraction(4), Fraction(500, 7)])
@pytest.mark.parametrize("steps", [1, 10, 64])
def test_what_is_asked_before_rounds_is_a_twentieth_of_the_training(
    kind: type[OwnSize], batches: Fraction, steps: int
) -> None:
    rounds = 400
    times = len(rounds_with_a_resizing(kind, steps, batches, rounds))
    asked = times * kind.resize_passes({}) * batches
    trained = rounds * steps * 3 * kind.gradients_per_step  # a gradient costs three passes
    one = kind.resize_passes({}) * batches
    seldom = times <= (rounds - 1) * steps // 40  # as they may be tried in any case
    assert asked <= trained / 20 or seldom
    assert asked > trained / 20 - 2 * one or times == rounds - 1
    counted = kind.resize_batches({}, batches, steps)
    assert abs(counted * (rounds - 1) - float(asked)) <= float(one)


def test_the_size_in_use_is_kept_where_no_other_is_better() -> None:
    s = some_state(3)
    same: Judge = lambda x, y: torch.ones(3, 4)  # noqa: E731
    for serving in (False, True):
        assert torch.equal(sized_method().resize(s, same, serving=serving).y, s.y)


def test_clients_are_judged_by_their_own_rows_and_without_rows_nothing_changes() -> None:
    """nan stands behind a client's last row; the third has none at all."""
    s = some_state(3)
    judged = quadratic(s.y, [0.0, 1.4, 0.0])

    def judge(x: Tensor, y: Tensor) -> Tensor:
        losses = judged(x, y)
        losses[0, 2:], losses[2] = torch.nan, torch.nan
        return losses

    for serving in (False, True):
        found = sized_method().resize(s, judge, serving=serving).y
        assert torch.equal(found[1, D], 1.4 * s.y[1, D]) and torch.equal(found[2], s.y[2])
        assert not found[0, D].any() and torch.equal(found[0, C], s.y[0, C])


@pytest.mark.parametrize("seed", range(40))
def test_what_is_served_is_never_worse_than_any_other_try(seed: int) -> None:
    """Random judges, with rows missing and models that diverge: on the judge's rows no client is worse off than with
    the common adapter alone, nor than with the size it had."""
    random = torch.Generator().manual_seed(seed)
    clients, rows = 5, 7
    s = some_state(clients, seed)
    weights = torch.randn(clients, rows, OWN.size, generator=random, dtype=torch.float64)
    targets = 3 * torch.randn(clients, rows, generator=random, dtype=torch.float64)
    counts = torch.randint(0, rows + 1, (clients, 1), generator=random)
    broken = torch.rand(clients, generator=random) < 0.3  # what is larger than it was is not finite

    def judge(x: Tensor, y: Tensor) -> Tensor:
        losses = (torch.einsum("kij,kj->ki", weights, y) - targets).square()
        grown = y[:, D].norm(dim=1) > 0.9 * s.y[:, D].norm(dim=1)
        losses = torch.where((broken & grown).unsqueeze(1), torch.inf, losses)
        return losses.masked_fill(torch.arange(rows) >= counts, torch.nan)

    method, nobody = sized_method(), (counts == 0).flatten()
    served = method.resize(s, judge, serving=True)
    trained = method.resize(s, judge)
    best, middle = judge(s.x, served.y).nanmean(1), judge(s.x, trained.y).nanmean(1)
    for other in (torch.zeros_like(s.y), s.y, trained.y):
        assert (best <= judge(s.x, other).nanmean(1))[~nobody].all()
    assert (middle <= judge(s.x, s.y).nanmean(1))[~nobody].all()
    assert torch.isfinite(best[~nobody]).all() and torch.isfinite(served.y).all()
    assert torch.equal(served.y[nobody], s.y[nobody])


def test_a_model_that_is_no_number_gives_way_to_one_that_is() -> None:
    """Also where y itself is none: it is served the common adapter alone."""
    s = some_state(3)
    s.y[2, D.start] = torch.nan

    def judge(x: Tensor, y: Tensor) -> Tensor:
        losses = 1 + y[:, D].square().sum(1, keepdim=True).expand(-1, 4)
        large = y[:, D].norm(dim=1, keepdim=True) > 0.7 * s.y[:, D].norm(dim=1, keepdim=True)
        losses = torch.where(large & torch.tensor([[True], [False], [False]]), torch.inf, losses)
        return losses.masked_fill(~torch.isfinite(losses), torch.inf)

    served = sized_method().resize(s, judge, serving=True)
    assert torch.isfinite(served.y).all() and torch.isfinite(judge(s.x, served.y)).all()
    trained = sized_method().resize(s, judge)
    assert torch.isfinite(judge(s.x, trained.y)[:2]).all()


def test_a_bias_and_c_have_no_size() -> None:
    y = some_state(2).y
    assert sized_method().sized(y).nonzero().flatten().tolist() == list(range(D.start, D.stop))
    assert not PF2LoRA(regression_problem().layout).sized(y).any()  # built by hand, without its layout
