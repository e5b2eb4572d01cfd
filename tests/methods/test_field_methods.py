"""The field's methods by their equations, in float64, and what they are at the ends of their settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_methods import gradient_at, run
from tiny import SETTINGS, Problem, build, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.optim import adamw, no_moments
from pf2lora.errors import UserError
from pf2lora.methods.ditto import Ditto
from pf2lora.methods.feddpa import FedDPAT
from pf2lora.methods.fedprox import FedProx
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.homlora_bias import HomLoRABias
from pf2lora.methods.homlora_ft import HomLoRAFT
from pf2lora.methods.local import Local
from pf2lora.methods.pf2lora_joint import PF2LoRAJoint

ALL = [0, 1, 2]
SGD: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0, "optimizer": "sgd"}


def close(found: Tensor, expected: Tensor, atol: float = 1e-13) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def equal_rank(**spec: Any) -> Problem:
    return regression_problem(client_rank=4, **spec)


# --- FedProx -----------------------------------------------------------------------------------------------


def test_fedprox_without_its_pull_is_homlora() -> None:
    p = regression_problem()
    ours, theirs, pulled = (
        run(method, p) for method in (FedProx(p.layout, mu=0), HomLoRA(p.layout), FedProx(p.layout, mu=1))
    )
    assert torch.equal(ours[-1].common, theirs[-1].common)
    assert not torch.allclose(pulled[-1].common, theirs[-1].common)


def test_fedproxs_second_step_is_pulled_to_where_the_round_began() -> None:
    """By hand: `x₂ = x₁ − η (∇f(x₁) + µ (x₁ − x₀))`, and after the average x̄ is the average."""
    p = regression_problem()
    method = FedProx(p.layout, mu=2.0, **SGD)
    first, second = (p.source.draw(ALL, [i] * 3) for i in (0, 1))
    one, _ = method.step(p.F, method.init(p.x, p.y), first)
    two, _ = method.step(p.F, one, second)
    x1 = p.x - 0.05 * gradient_at(p, p.x, p.y, first)[0]
    close(one.x, x1)
    close(two.x, x1 - 0.05 * (gradient_at(p, x1, p.y, second)[0] + 2.0 * (x1 - p.x)))
    done = run(method, p, rounds=1)[0]
    close(done.served.opt.anchor, done.common.expand(3, -1))


@pytest.mark.parametrize("setting", ["fedprox", "ditto"])
def test_a_personal_head_is_pulled_nowhere(setting: str) -> None:
    p = tiny_problem("roberta", head="personal")
    method = build(setting, p)
    shared = p.layout.shared
    assert 0 < shared < p.layout.size
    away = p.x + 1.0
    anchor = p.x[:, :shared]
    pulled = method.drift(away, anchor)  # type: ignore[attr-defined]
    assert torch.equal(pulled[:, :shared], away[:, :shared] - anchor) and not pulled[:, shared:].any()


# --- Ditto -------------------------------------------------------------------------------------------------


def test_ditto_without_its_penalty_is_local_beside_homlora() -> None:
    p = regression_problem()
    ours = run(Ditto(p.layout, penalty=0), p)
    for done, homlora, local in zip(ours, run(HomLoRA(p.layout), p), run(Local(p.layout), p), strict=True):
        assert torch.equal(done.served.x, homlora.served.x)
        assert torch.equal(done.served.opt.own, local.served.x)


def test_dittos_copy_by_hand() -> None:
    """`v⁺ = v − η (∇f(v) + λ (v − x̄))`, x̄ what the round began with and not what x has become since."""
    p = regression_problem()
    method = Ditto(p.layout, penalty=3.0, **SGD)
    batches = [p.source.draw(ALL, [i] * 3) for i in range(4)]
    state, v, x = method.init(p.x, p.y), p.x, p.x
    anchor = p.x
    for i, batch in enumerate(batches):
        state, stats = method.step(p.F, state, batch)
        close(stats.loss, p.F(v, p.y, batch))
        v = v - 0.05 * (gradient_at(p, v, p.y, batch)[0] + 3.0 * (v - anchor))
        x = x - 0.05 * gradient_at(p, x, p.y, batch)[0]
        if i == 1:
            anchor = x = x.mean(0).expand(3, -1)
            state = received(method, state, x[0])
    close(state.opt.own, v)
    close(state.x, x)
    assert method.personal(p.F, state) == (state.opt.own, state.y)


def received(method: Any, state: Any, answer: Tensor) -> Any:
    return method.receive(state, answer, 1)


def test_the_larger_the_penalty_the_nearer_dittos_copies_are_to_the_average() -> None:
    p = regression_problem()
    away = []
    for penalty in (0.0, 0.5, 4.0, 20.0):  # η λ = 1 at the last: each step begins anew at x̄
        done = run(Ditto(p.layout, penalty=penalty, **SGD), p, rounds=20)[-1]
        away.append(float((done.before.opt.own - done.before.opt.anchor).norm()))
    assert away[0] > away[1] > away[2] > away[3]
    last = p.source.draw(ALL, [39] * 3)
    close(
        done.before.opt.own, done.before.opt.anchor - 0.05 * gradient_at(p, own_before_last(p), p.y, last)[0]
    )


def own_before_last(p: Problem) -> Tensor:
    """v before the last step of that run, by the method itself."""
    method = Ditto(p.layout, penalty=20.0, **SGD)
    done = run(method, p, rounds=19)[-1].served
    return method.step(p.F, done, p.source.draw(ALL, [38] * 3))[0].opt.own


# --- HOMLoRA + fine-tuning and + bias ----------------------------------------------------------------------


def test_fine_tuning_is_homloras_steps_alone() -> None:
    p = regression_problem()
    method, plain = HomLoRAFT(p.layout, finetune_steps=3), HomLoRA(p.layout)
    ours, theirs = run(method, p)[-1].served, run(plain, p)[-1].served
    assert torch.equal(ours.x, theirs.x)  # training is HOMLoRA's
    batches = [p.source.draw(ALL, [i] * 3) for i in (6, 7, 8)]
    state = theirs
    for batch in batches:
        state, _ = plain.step(p.F, state, batch)
    x, y = method.personal(p.F, ours, *batches)
    assert torch.equal(x, state.x) and y is ours.y and method.personal_draws == 3
    assert torch.equal(method.personal(p.F, ours)[0], ours.x)
    with pytest.raises(UserError, match="finetune_steps is -1"):
        HomLoRAFT(p.layout, finetune_steps=-1)


def test_the_bias_is_learned_beside_x_at_its_own_rate() -> None:
    """As PF2LoRA without bilevel learns its y; with rate 0, HOMLoRA."""
    p = tiny_problem("roberta", client_rank=0, client_bias=True, moved=False)
    assert p.y.shape == (3, 3) and not p.y.any()
    ours = run(HomLoRABias(p.layout, bias_lr=0.2), p)[-1].served
    theirs = run(PF2LoRAJoint(p.layout, client_lr=0.2), p)[-1].served
    assert torch.equal(ours.x, theirs.x) and torch.equal(ours.y, theirs.y) and (ours.y.abs() > 0.01).any()
    still = run(HomLoRABias(p.layout, bias_lr=0.0), p)[-1].served
    assert torch.equal(still.x, run(HomLoRA(p.layout), p)[-1].served.x) and not still.y.any()


# --- FedDPA ------------------------------------------------------------------------------------------------


def products(p: Problem, x: Tensor, y: Tensor) -> list[Tensor]:
    """`BA + DC` of every layer."""
    common, own = p.layout.unpack(x), p.personal_layout.unpack(y)
    return [
        common[B.name] @ common[A.name] + own[f"{A.module}.D"] @ own[f"{A.module}.C"]
        for B, A in p.layout.pairs("B", "A")
    ]


def test_the_mixture_is_that_of_the_two_products() -> None:
    p = equal_rank()
    method = FedDPAT(p.layout, mixing_weight=0.3, personal_layout=p.personal_layout)
    mixed = products(p, *method.personal(p.F, method.init(p.x, p.y)))
    nothing_x, nothing_y = torch.zeros_like(p.x), torch.zeros_like(p.y)
    for both, common, own in zip(
        mixed, products(p, p.x, nothing_y), products(p, nothing_x, p.y), strict=True
    ):
        close(both, 0.7 * common + 0.3 * own)


def test_feddpa_t_by_hand() -> None:
    """The own adapter's gradient is at the mixture with the global one as it was received; the global one's without any
    own one. Both are AdamW's steps."""
    p = equal_rank()
    method = FedDPAT(p.layout, mixing_weight=0.25, lr=0.02, personal_layout=p.personal_layout)
    state, moments, own = method.init(p.x, p.y), no_moments(p.x), no_moments(p.y)
    x, y = p.x, p.y
    for i in range(3):
        batch = p.source.draw(ALL, [i] * 3)
        y_ = y.clone().requires_grad_()
        loss = p.F(*method.mixed(p.x, y_), batch)
        (gy,) = torch.autograd.grad(loss.sum(), y_)
        gx = gradient_at(p, x, torch.zeros_like(y), batch)[0]
        y, own = adamw(gy, own, y, 0.02)
        x, moments = adamw(gx, moments, x, 0.02)
        state, stats = method.step(p.F, state, batch)
        close(stats.loss, loss.detach())
    close(state.x, x)
    close(state.y, y)
    assert (state.y - p.y).abs().max() > 0.01


def test_feddpa_t_at_weight_0_serves_homlora_and_at_1_the_own_adapter_alone() -> None:
    p = equal_rank()
    nothing = p._replace(y=torch.zeros_like(p.y))
    homlora = run(HomLoRA(p.layout), nothing)[-1].served
    for weight in (0.0, 1.0):
        method = FedDPAT(p.layout, mixing_weight=weight, personal_layout=p.personal_layout)
        served = run(method, p)[-1].served
        assert torch.equal(served.x, homlora.x)  # the global adapter is HOMLoRA's whatever is mixed
        own = torch.zeros_like(served.y) if weight == 0 else served.y
        rest = served.x if weight == 0 else torch.zeros_like(served.x)
        for found, expected in zip(
            products(p, *method.personal(p.F, served)), products(p, rest, own), strict=True
        ):
            close(found, expected)


@pytest.mark.parametrize(("scaling", "client_scaling"), [(1.0, 1.0), (2.0, 0.5)])
def test_feddpa_f_between_homlora_and_fine_tuning(scaling: float, client_scaling: float) -> None:
    spec: dict[str, Any] = {
        "client_rank": 4,
        "scaling": scaling,
        "client_scaling": client_scaling,
        "moved": False,
    }
    p = tiny_problem("roberta", **spec)
    plain = tiny_problem("roberta", **spec | {"client_rank": 0})
    batches = [p.source.draw(ALL, [i] * 3) for i in (6, 7)]
    theirs = run(HomLoRA(plain.layout, lr=0.01), plain)[-1].served
    tuned, _ = HomLoRAFT(plain.layout, lr=0.01, finetune_steps=2).personal(plain.F, theirs, *batches)
    losses = {}
    for weight in (0.0, 0.5, 1.0):
        scalings: dict[str, Any] = {"scaling": scaling, "client_scaling": client_scaling}
        method = build("feddpa-f", p, mixing_weight=weight, **scalings)
        served = run(method, p)[-1].served
        close(served.x, theirs.x, 1e-12)
        losses[weight] = p.F(*method.personal(p.F, served, *batches), batches[0])
    close(losses[0.0], plain.F(theirs.x, plain.y, batches[0]), 1e-12)
    close(losses[1.0], plain.F(tuned, plain.y, batches[0]), 1e-12)
    assert (losses[0.0] - losses[1.0]).abs().min() > 1e-3
    assert not torch.allclose(losses[0.5], losses[0.0]) and not torch.allclose(losses[0.5], losses[1.0])


def test_a_share_outside_0_and_1_is_refused() -> None:
    with pytest.raises(UserError, match=r"mixing_weight is 1\.5"):
        FedDPAT(regression_problem().layout, mixing_weight=1.5)


# --- every method with every head --------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_method_takes_every_head(setting: str, head: str) -> None:
    """What is personal stays with its client, y is in nothing that leaves, and what a client uses has this head."""
    p = tiny_problem("roberta", head=head, client_rank=4)
    method = build(setting, p)
    done = run(method, p, rounds=2, participation=0.7)[-1]
    batches = [p.source.draw(ALL, [n] * 3) for n in range(4, 4 + method.personal_draws)]
    x, y = method.personal(p.F, done.served, *batches)
    loss = p.F(x, y, p.source.draw(ALL, [9] * 3))
    assert x.shape == p.x.shape and y.shape == p.y.shape and torch.isfinite(loss).all()
    assert (x - p.x).abs().max() > 1e-3
    if head == "personal" and method.federated:
        own = slice(p.layout.shared, None)
        assert torch.equal(done.served.x[:, own], done.before.x[:, own])
        assert not torch.equal(done.served.x[0, own], done.served.x[1, own])
    _, sent = method.send(done.before, 2)
    assert not torch.isin(done.before.y[done.before.y != 0], sent).any()
