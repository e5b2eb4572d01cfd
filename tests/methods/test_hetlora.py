"""HETLoRA against dense hand computations: ranks, truncation, penalty, self-pruning, weights."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import floor
from typing import Any

import pytest
import torch
from tiny import Problem, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.method import State
from pf2lora.engines.local import Schedule, train
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.rank_per_client import initial_ranks

ALL = [0, 1, 2]


@pytest.fixture
def p() -> Problem:
    return regression_problem(rank=6, client_rank=0)


def het(p: Problem, **options: Any) -> HetLoRA:
    given: dict[str, Any] = {"lr": 0.02, "ranks": (2, 4, 6), "gamma": 0.7, "penalty": 0.1}
    return HetLoRA(p.layout, **given | options)


def factors(p: Problem, x: Tensor, client: int) -> list[tuple[Tensor, Tensor]]:
    views = p.layout.unpack(x)
    return [(views[f"w{i}.B"][client], views[f"w{i}.A"][client]) for i in range(2)]


def dense_tail(p: Problem, x: Tensor, client: int, rank: int, gamma: float) -> Tensor:
    """`Σ ‖B[:, t:r]‖_F ‖A[t:r, :]‖_F`, written with slices."""
    t = floor(gamma * rank + 1e-12)
    tails = (
        B[:, t:rank].square().sum().sqrt() * A[t:rank].square().sum().sqrt() for B, A in factors(p, x, client)
    )
    return sum(tails, torch.zeros(()))


def beyond(p: Problem, x: Tensor, ranks: list[int]) -> Tensor:
    """All numbers that a client of rank r_k must not have."""
    parts = [
        piece.flatten()
        for k, rank in enumerate(ranks)
        for B, A in factors(p, x, k)
        for piece in (B[:, rank:], A[rank:])
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("clients", "r_min", "r_max", "expected"),
    [
        (8, 8, 12, [8, 8, 9, 9, 10, 10, 11, 11]),
        (8, 5, 12, [5, 5, 6, 7, 8, 9, 10, 11]),
        (2, 1, 12, [1, 6]),
        (3, 4, 4, [4, 4, 4]),
        (1, 2, 9, [2]),
    ],
)
def test_first_ranks_follow_the_formula(clients: int, r_min: int, r_max: int, expected: list[int]) -> None:
    assert initial_ranks(clients, r_min, r_max) == expected
    formula = [floor(r_min + (r_max - r_min) * (k - 1) / clients) for k in range(1, clients + 1)]
    assert initial_ranks(clients, r_min, r_max) == formula


def test_the_start_is_truncated_to_each_clients_rank(p: Problem) -> None:
    state = het(p).init(p.x, p.y)
    assert not beyond(p, state.x, [2, 4, 6]).any()
    for k, rank in enumerate((2, 4, 6)):
        for (B, A), (B0, A0) in zip(factors(p, state.x, k), factors(p, p.x, k)):
            assert torch.equal(B[:, :rank], B0[:, :rank]) and torch.equal(A[:rank], A0[:rank])
    assert torch.equal(p.layout.unpack(state.x)["head.bias"], p.layout.unpack(p.x)["head.bias"])


@pytest.mark.parametrize("gamma", [0.5, 0.7, 0.99])
def test_the_penalty_equals_a_dense_computation(p: Problem, gamma: float) -> None:
    """The gradient of loss + λ·tail by autodiff of the slices; AdamW's first mean is a tenth of it."""
    method = het(p, gamma=gamma, penalty=0.3)
    state = method.init(p.x, p.y)
    batch = p.source.draw(ALL, [0] * 3)
    x_ = state.x.clone().requires_grad_()
    tails = torch.stack([dense_tail(p, x_, k, rank, gamma) for k, rank in enumerate((2, 4, 6))])
    assert (tails > 0.1).all()
    torch.testing.assert_close(method.tail(state.x, state.opt.rank), tails.detach(), rtol=1e-14, atol=0)
    (g,) = torch.autograd.grad((p.F(x_, p.y, batch) + 0.3 * tails).sum(), x_)
    after, report = method.step(p.F, state, batch)
    allowed = method.kept(state.opt.rank, state.x)
    torch.testing.assert_close(after.opt.adam.mean / 0.1, g * allowed, rtol=0, atol=1e-13)
    torch.testing.assert_close(report.loss, p.F(state.x, p.y, batch))  # the loss alone is reported


def test_the_tail_starts_at_the_floor_of_gamma_times_rank() -> None:
    p = regression_problem(rank=6)
    columns = lambda gamma, ranks: het(p, gamma=gamma).kept_columns(torch.tensor(ranks)).tolist()  # noqa: E731
    assert columns(0.99, [1, 2, 8, 12]) == [0, 1, 7, 11]  # the last column
    assert columns(0.7, [10, 3, 1]) == [7, 2, 0]
    assert columns(0.29, [100]) == [29]  # in floating point 0.29 · 100 is 28.999…
    assert columns(0.5, [4, 5]) == [2, 2]


def drive(method: HetLoRA, p: Problem, rounds: int = 8) -> list[State]:
    """States after every step, every send and every receive; checks the invariants on the way."""
    state, states, number = method.init(p.x, p.y), [], 0
    for _ in range(rounds):
        for _ in range(3):
            state, _ = method.step(p.F, state, p.source.draw(ALL, [number] * 3))
            number += 1
            states.append(state)
        state, sent = method.send(state, 1)
        states.append(state)
        assert torch.equal(sent, state.x)
        assert method.sent_numbers(state, 1) == [
            sum((B.shape[0] + A.shape[1]) * int(state.opt.rank[k]) for B, A in factors(p, state.x, k)) + 5
            for k in ALL
        ]
        state = method.receive(state, method.average(sent, torch.ones(3) / 3), 1)
        states.append(state)
    return states


@pytest.mark.parametrize("r_min", [1, 2])
def test_ranks_never_rise_nor_fall_below_the_least_and_what_is_cut_stays_zero(p: Problem, r_min: int) -> None:
    states = drive(het(p, r_min=r_min, penalty=1.0), p)
    ranks = [s.opt.rank.tolist() for s in states]
    for earlier, later in itertools.pairwise(ranks):
        assert all(r_min <= b <= a for a, b in zip(earlier, later))
    assert sum(ranks[-1]) < sum(ranks[0])  # pruning did happen
    for state, rank in zip(states, ranks):
        assert (beyond(p, state.x, rank) == 0).all()
        assert (beyond(p, state.opt.adam.mean, rank) == 0).all()
        assert (beyond(p, state.opt.adam.square, rank) == 0).all()
        for k, r in enumerate(rank):
            assert all((B[:, :r] != 0).all() and (A[:r] != 0).all() for B, A in factors(p, state.x, k))


def test_a_rank_is_pruned_exactly_when_the_tail_fell_over_the_round(p: Problem) -> None:
    method = het(p, ranks=(6, 6, 6), gamma=0.7, r_min=1)
    start = method.init(p.x, p.y)
    views = {name: t.clone() for name, t in p.layout.unpack(start.x).items()}
    views["w0.B"][0, :, 4:] *= 0.9  # client 0's tail falls (columns 4 and 5 are its last 30%)
    views["w0.B"][1, :, 4:] *= 1.1  # client 1's rises
    views["w0.B"][2, :, :4] *= 0.1  # client 2's stays, the rest falls
    after, sent = method.send(start._replace(x=p.layout.pack(views)), 1)
    assert after.opt.rank.tolist() == [4, 6, 6]
    assert not beyond(p, sent, [4, 6, 6]).any()
    stopped, _ = replace(method, r_min=5).send(start._replace(x=p.layout.pack(views)), 1)
    assert stopped.opt.rank.tolist() == [5, 6, 6]


def test_the_tail_is_measured_from_what_the_round_began_with(p: Problem) -> None:
    method = het(p, ranks=(6, 6, 6))
    state, sent = method.send(method.init(p.x, p.y), 1)
    assert state.opt.rank.tolist() == [6, 6, 6]  # nothing fell
    state = method.receive(
        state, 0.5 * sent[0], 1
    )  # the server's answer is smaller: that is not the client's doing
    unchanged, _ = method.send(state, 1)
    assert unchanged.opt.rank.tolist() == [6, 6, 6]


def test_weights_are_the_shares_of_the_dense_products(p: Problem) -> None:
    method = het(p)
    _, sent = method.send(method.init(p.x * torch.tensor([[1.0], [2.0], [0.5]]).double(), p.y), 1)
    nothing = torch.zeros(())
    norms = [sum(((B @ A).square().sum() for B, A in factors(p, sent, k)), nothing).sqrt() for k in ALL]
    weights = [n / sum(norms) for n in norms]
    assert sum(weights) == pytest.approx(1.0)
    expected = sum(w * row for w, row in zip(weights, sent))
    for sizes in ([1 / 3] * 3, [0.8, 0.1, 0.1]):  # whatever the clients' sizes
        merged = method.average(sent, torch.tensor(sizes))
        torch.testing.assert_close(merged, expected, rtol=0, atol=1e-14)
    for how in ("client", "module"):  # a number that all clients agree on comes back: the weights sum to one
        views = p.layout.unpack(sent) | {"head.bias": torch.full((3, 5), 2.5, dtype=sent.dtype)}
        merged = replace(method, weight_by=how).average(p.layout.pack(views), torch.ones(3))
        torch.testing.assert_close(merged[-5:], torch.full((5,), 2.5, dtype=sent.dtype), rtol=1e-14, atol=0)


def test_weights_per_module(p: Problem) -> None:
    method = het(p, weight_by="module")
    _, sent = method.send(method.init(p.x * torch.tensor([[1.0], [2.0], [0.5]]).double(), p.y), 1)
    merged = p.layout.unpack(method.average(sent, torch.ones(3) / 3).unsqueeze(0))
    all_norms = []
    for i in range(2):
        norms = torch.stack([(B @ A).norm() for B, A in (factors(p, sent, k)[i] for k in ALL)])
        all_norms.append(norms)
        weights = norms / norms.sum()
        for kind in "AB":
            expected = sum(w * row for w, row in zip(weights, p.layout.unpack(sent)[f"w{i}.{kind}"]))
            torch.testing.assert_close(merged[f"w{i}.{kind}"][0], expected, rtol=0, atol=1e-14)
    client = torch.stack(all_norms).square().sum(0).sqrt()
    expected = (client / client.sum()) @ p.layout.unpack(sent)["head.bias"]
    torch.testing.assert_close(merged["head.bias"][0], expected, rtol=0, atol=1e-14)
    assert not torch.allclose(
        method.average(sent, torch.ones(3)), replace(method, weight_by="client").average(sent, torch.ones(3))
    )


def test_clients_that_learned_nothing_weigh_the_same(p: Problem) -> None:
    method = het(p)
    views = p.layout.unpack(p.x.clone())
    zero = p.layout.pack({n: torch.zeros_like(v) if n.endswith(".B") else v for n, v in views.items()})
    for how in ("client", "module"):
        merged = replace(method, weight_by=how).average(zero, torch.ones(3))
        torch.testing.assert_close(merged, zero.mean(0), rtol=0, atol=1e-14)


def test_a_client_receives_the_common_adapter_cut_to_its_rank(p: Problem) -> None:
    method = het(p)
    state = method.receive(method.init(p.x, p.y), 3 * p.x[0], 1)
    for k, rank in enumerate((2, 4, 6)):
        for (B, A), (B0, A0) in zip(factors(p, state.x, k), factors(p, 3 * p.x, 0)):
            assert torch.equal(B[:, :rank], B0[:, :rank]) and torch.equal(A[:rank], A0[:rank])
    assert not beyond(p, state.x, [2, 4, 6]).any()


def test_full_ranks_without_penalty_step_as_homlora(p: Problem) -> None:
    batch = p.source.draw(ALL, [0] * 3)
    one, other = het(p, ranks=(6, 6, 6), penalty=0.0), HomLoRA(p.layout, lr=0.02)
    a, _ = one.step(p.F, one.init(p.x, p.y), batch)
    b, _ = other.step(p.F, other.init(p.x, p.y), batch)
    assert torch.equal(a.x, b.x)


def test_over_rounds_on_a_transformer_from_a_fresh_start() -> None:
    """B = 0 at first: the tail cannot have fallen in round 1, and the penalty's gradient there is a number."""
    p = tiny_problem("roberta", moved=False, client_rank=0)
    method = HetLoRA(p.layout, lr=0.02, ranks=(1, 2, 4), penalty=0.5)
    rounds = [
        done.kept()
        for done in train(method, p.F, method.init(p.x, p.y), p.source, Schedule(rounds=3, steps=2))
    ]
    assert rounds[0].served.opt.rank.tolist() == [1, 2, 4]
    assert all(torch.isfinite(r.served.x).all() for r in rounds)
