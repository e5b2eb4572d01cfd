"""FedSA-LoRA, FFA-LoRA and RoLoRA: by hand in float64, and what each of them promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Problem, build, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import Updates
from pf2lora.core.optim import OPTIMIZERS, no_moments
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.fedsa_lora import FedSALoRA
from pf2lora.methods.ffa_lora import FFALoRA
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.rolora import RoLoRA


def rounds_of(method: Any, p: Problem, **schedule: Any) -> list[Round]:
    state = method.init(p.x, p.y)
    return [r.kept() for r in train(method, p.F, state, p.source, Schedule(**{"steps": 2} | schedule))]


def kind(p: Problem, x: Tensor, *kinds: Any) -> Tensor:
    """The numbers of some kinds of entries."""
    return torch.cat([t.flatten(1) for name, t in p.layout.unpack(x).items() if named(p, name) in kinds], 1)


def named(p: Problem, name: str) -> str:
    return p.layout.by_name[name].kind


def products(p: Problem, x: Tensor) -> dict[str, Tensor]:
    views = p.layout.unpack(x)
    return {up.module: views[up.name] @ views[down.name] for up, down in p.layout.pairs("B", "A")}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---- FedSA-LoRA ----


def test_fedsa_averages_a_and_leaves_b_and_the_head_alone() -> None:
    p = tiny_problem("roberta", head="shared", client_rank=0)
    for done in rounds_of(build("fedsa-lora", p), p, rounds=3):
        before, served = done.before.x, done.served.x
        close(kind(p, served, "A"), kind(p, before, "A").mean(0).expand(3, -1))
        for own in ("B", "head"):
            assert torch.equal(kind(p, served, own), kind(p, before, own))
            assert (kind(p, served, own)[0] != kind(p, served, own)[1]).any()


def test_fedsa_steps_as_homlora_does() -> None:
    p = regression_problem(client_rank=0)
    ours, plain = (rounds_of(m(p.layout, lr=0.01), p, rounds=1)[0] for m in (FedSALoRA, HomLoRA))
    assert torch.equal(ours.before.x, plain.before.x)


def test_what_fedsas_clients_share_is_a_before_nothing() -> None:
    p = regression_problem(client_rank=0)
    start = p.layout.pack(
        {n: torch.zeros_like(t) if named(p, n) == "B" else t for n, t in p.layout.unpack(p.x).items()}
    )
    p = p._replace(x=start)
    method = FedSALoRA(p.layout, lr=0.01)
    *_, last = rounds_of(method, p, rounds=2)
    common = method.common(p.x[:1], last.common, 2)
    close(kind(p, common, "A"), kind(p, last.before.x, "A").mean(0, keepdim=True))
    assert kind(p, common, "B").abs().max() == 0 < kind(p, last.served.x, "B").abs().max()


@pytest.mark.parametrize(
    ("asked", "has"), [("shared", "personal"), ("personal", "personal"), ("frozen",) * 2]
)
def test_a_head_that_is_trained_is_a_clients_own(asked: str, has: str) -> None:
    assert FedSALoRA.head_placement(asked) == has
    assert HomLoRA.head_placement(asked) == asked


# ---- FFA-LoRA ----


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ffas_step_is_the_optimizers_on_b_and_the_head_each_at_its_rate(optimizer: str) -> None:
    p = regression_problem(client_rank=0)
    method = FFALoRA(p.layout, lr=0.02, optimizer=optimizer, b_lr_ratio=3.0)
    state, x = method.init(p.x, p.y), p.x
    moments = {own: no_moments(kind(p, x, own)) for own in ("B", "head")}
    for i in range(3):
        batch = p.source.draw([0, 1, 2], [i] * 3)
        state, _ = method.step(p.F, state, batch)
        x_ = x.detach().requires_grad_()
        gradient = torch.autograd.grad(p.F(x_, p.y, batch).sum(), x_)[0]
        for own, lr in (("B", 0.06), ("head", 0.02)):
            old, slope = kind(p, x, own), kind(p, gradient, own)
            new, moments[own] = OPTIMIZERS[optimizer](slope, moments[own], old, lr, weight_decay=0.01)
            part = Layout.of(e for e in p.layout.entries if e.kind == own)
            x = p.layout.replaced(x, part, new)
    close(state.x, x)
    assert torch.equal(kind(p, state.x, "A"), kind(p, p.x, "A"))
    with pytest.raises(UserError, match=r"b_lr_ratio is 0\.0; it must be above 0"):
        FFALoRA(p.layout, b_lr_ratio=0.0)


def test_ffas_average_of_products_is_the_product_of_averages() -> None:
    p = regression_problem(client_rank=0)
    for done in rounds_of(FFALoRA(p.layout, lr=0.05), p, rounds=3, weighting="size"):
        weights = torch.tensor(p.source.sizes, dtype=torch.float64) / sum(p.source.sizes)
        before, served = products(p, done.before.x), products(p, done.served.x)
        for module, each in before.items():
            close(served[module][0], torch.einsum("k,kmn->mn", weights, each))
    homlora = rounds_of(HomLoRA(p.layout, lr=0.05), p, rounds=1)[0]  # which FedAvg on both factors is not
    mean, got = products(p, homlora.before.x), products(p, homlora.served.x)
    assert max((got[m][0] - mean[m].mean(0)).abs().max() for m in mean) > 1e-4


def test_ffa_trains_and_sends_half() -> None:
    p = tiny_problem("roberta", head="frozen", client_rank=0)
    method = FFALoRA(p.layout)
    state = method.init(p.x, p.y)
    assert method.trained_numbers(state) == method.sent_numbers(state, 1) == [p.layout.adapter_size // 2] * 3
    assert sum(t.numel() for t in state.opt) == 2 * 3 * p.layout.adapter_size // 2 + 3  # moments too


# ---- RoLoRA ----


def test_rounds_of_rolora_move_and_send_one_factor() -> None:
    p = tiny_problem("roberta", head="shared", client_rank=0)
    method, x = build("rolora", p), p.x
    for done in rounds_of(method, p, rounds=4):
        moving, still = ("B", "A") if done.number % 2 else ("A", "B")
        assert {e.kind for e in method.leaves(done.number).entries} == {moving, "head"}
        assert torch.equal(kind(p, done.before.x, still), kind(p, x, still))
        assert (kind(p, done.before.x, moving) != kind(p, x, moving)).any()
        for part in (moving, "head"):
            close(kind(p, done.served.x, part), kind(p, done.before.x, part).mean(0).expand(3, -1))
        before, served = products(p, done.before.x), products(p, done.served.x)
        for module, each in before.items():  # the average of the products, in every round
            close(served[module][0], each.mean(0))
        x = done.served.x


def test_a_first_round_of_rolora_is_one_of_ffa() -> None:
    p = regression_problem(client_rank=0)
    methods = RoLoRA(p.layout, lr=0.03), FFALoRA(p.layout, lr=0.03, b_lr_ratio=1.0)
    ours, ffa = (rounds_of(method, p, rounds=1)[0] for method in methods)
    close(ours.served.x, ffa.served.x)


def test_each_kind_of_round_of_rolora_has_its_own_optimizer() -> None:
    p = regression_problem(client_rank=0)
    *_, last = rounds_of(RoLoRA(p.layout, lr=0.03), p, rounds=3, steps=2)
    assert last.served.opt.up.step.flatten().tolist() == [4.0] * 3
    assert last.served.opt.down.step.flatten().tolist() == [2.0] * 3


def test_rolora_tells_who_was_away_both_factors() -> None:
    p = regression_problem(client_rank=0)
    method = RoLoRA(p.layout)
    server = method.first_server(p.x[:0, 0])
    parts = [method.leaves(n).size for n in (1, 2)]
    sent = [torch.randn(2, size, dtype=torch.float64) for size in parts]
    weights = torch.tensor([0.25, 0.75])
    first, server = method.merge(Updates(sent[0], weights, (0, 1), 1), server)
    assert first.shape == (parts[0],) and method.arrives(1) == method.leaves(1)
    second, server = method.merge(Updates(sent[1], weights, (0, 2), 2), server)
    assert method.arrives(2) == p.layout.shared_part and second.shape == (p.layout.shared,)
    away = p.layout.unpack(method.receive(method.init(p.x, p.y), second, 2).x)
    for number, got in ((1, sent[0]), (2, sent[1])):
        for name, each in method.leaves(number).unpack(got).items():
            if named(p, name) != "head" or number == 2:  # the head of the first round was averaged anew
                close(away[name][0], 0.25 * each[0] + 0.75 * each[1])
