"""SCAFFOLD: its algorithm by hand with SGD, its reductions to FedAvg, and its control variates' books."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Problem, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.randomness import participants
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.scaffold import Scaffold


def rounds_of(method: Any, p: Problem, **schedule: Any) -> list[Round]:
    state = method.init(p.x, p.y)
    return [r.kept() for r in train(method, p.F, state, p.source, Schedule(**{"steps": 2} | schedule))]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def gradient_at(p: Problem, x: Tensor, k: int, number: int) -> Tensor:
    x_ = x.detach().requires_grad_()
    batch = p.source.draw([k], [number])
    return torch.autograd.grad(p.F(x_[None], p.y[k : k + 1], batch).sum(), x_)[0]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_it_is_the_papers_algorithm_with_sgd(participation: float) -> None:
    """Algorithm 1, option II, with η_g = 1: c_k⁺ = c_k − c + (x − y_k) / (K η), c ← c + |S|/N mean Δc."""
    p = regression_problem(sizes=(7, 12, 3, 9), client_rank=0)
    lr, K, N = 0.05, 3, 4
    method = Scaffold(p.layout, lr=lr, weight_decay=0.0, optimizer="sgd", clients=N)
    ours = rounds_of(method, p, rounds=4, steps=K, participation=participation)
    x, c = p.x[0], torch.zeros_like(p.x[0])
    own, done = [torch.zeros_like(c) for _ in range(N)], [0] * N
    for number, found in enumerate(ours, 1):
        chosen, models, changes = participants(0, number, N, participation), [], []
        for k in chosen:
            y = x
            for i in range(K):
                y = y - lr * (gradient_at(p, y, k, done[k] + i) - own[k] + c)
            done[k] += K
            new = own[k] - c + (x - y) / (K * lr)
            models.append(y)
            changes.append(new - own[k])
            own[k] = new
        x = torch.stack(models).mean(0)
        c = c + len(chosen) / N * torch.stack(changes).mean(0)
        close(found.served.x, x.expand(N, -1))
        close(found.served.opt.own, torch.stack(own))
        close(found.served.opt.common, c.expand(N, -1))
        close(found.after.servers[0][0], c)


def test_the_first_round_is_fedavgs() -> None:
    """Before there are control variates, there is nothing to correct."""
    p = tiny_problem("roberta", client_rank=0)
    ours = rounds_of(Scaffold(p.layout, lr=0.01, clients=3), p, rounds=2)
    plain = rounds_of(HomLoRA(p.layout, lr=0.01), p, rounds=2)
    assert torch.equal(ours[0].served.x, plain[0].served.x)
    assert (ours[1].served.x - plain[1].served.x).abs().max() > 1e-4


def test_a_federation_of_one_is_fedavg() -> None:
    """c is c_k then: what is everybody's is one's own."""
    p = regression_problem(sizes=(9,), client_rank=0)
    ours, plain = (
        rounds_of(kind(p.layout, lr=0.01), p, rounds=3)[-1].served.x for kind in (Scaffold, HomLoRA)
    )
    close(ours, plain)


def test_c_is_the_mean_of_all_control_variates() -> None:
    p = tiny_problem("roberta", client_rank=0)
    for weighting in ("uniform", "size"):
        weights = torch.tensor(p.source.sizes if weighting == "size" else [1, 1, 1], dtype=torch.float64)
        for done in rounds_of(Scaffold(p.layout, lr=0.01, clients=3), p, rounds=3, weighting=weighting):
            close(done.served.opt.common[0], weights / weights.sum() @ done.served.opt.own)


def test_who_did_not_take_part_keeps_its_control_variate() -> None:
    p = regression_problem(client_rank=0)
    method = Scaffold(p.layout, clients=3)
    state, sent = method.send(method.init(p.x, p.y), 1)
    assert torch.equal(state.opt.own, torch.zeros_like(state.opt.own))
    assert sent[:, p.layout.shared :].abs().max() == 0 and torch.isfinite(sent).all()


@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
def test_twice_as_much_is_sent(head: str) -> None:
    p = tiny_problem("roberta", head=head, client_rank=0)
    method = Scaffold(p.layout, clients=3)
    state = method.init(p.x, p.y)
    assert method.sent_numbers(state, 1) == [2 * p.layout.shared] * 3
    names = {e.name for e in method.leaves(1).entries}
    assert names == {f"{e.name}{more}" for e in p.layout.shared_entries for more in ("", ".control")}
    *_, last = rounds_of(method, p, rounds=2)
    shared = p.layout.shared  # a head of one's own takes its plain gradient, and stays
    assert torch.equal(last.served.x[:, shared:], last.before.x[:, shared:])
