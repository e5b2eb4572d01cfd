"""FedEx-LoRA: with room for it the residual makes the average of the products exact; without, as near as can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import Problem, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.fedex_lora import FedExLoRA, nearest
from pf2lora.methods.homlora import HomLoRA


def rounds_of(method: Any, p: Problem, **schedule: Any) -> list[Round]:
    state = method.init(p.x, p.y)
    return [r.kept() for r in train(method, p.F, state, p.source, Schedule(**{"steps": 2} | schedule))]


def products(p: Problem, x: Tensor) -> dict[str, Tensor]:
    """`B A + R` of every client."""
    views = p.layout.unpack(x)
    return {up.module: views[up.name] @ views[down.name] for up, down in p.layout.pairs("B", "A")}


def error(p: Problem, done: Round, weights: Tensor) -> float:
    """How far what is served is from the average of what the clients had."""
    before, served = products(p, done.before.x), products(p, done.served.x)
    return max(float((served[m][0] - torch.einsum("k,kmn->mn", weights, before[m])).norm()) for m in before)


@pytest.mark.parametrize(("rows", "columns", "rank"), [(9, 7, 3), (4, 7, 6), (9, 3, 5), (5, 5, 5)])
def test_the_factors_are_the_nearest_of_their_rank(rows: int, columns: int, rank: int) -> None:
    random = torch.Generator().manual_seed(0)
    B = torch.randn(rows, 6, generator=random, dtype=torch.float64)
    A = torch.randn(6, columns, generator=random, dtype=torch.float64)
    U, V = nearest(B, A, rank)
    assert U.shape == (rows, rank) and V.shape == (rank, columns)
    u, s, v = torch.linalg.svd(B @ A, full_matrices=False)
    s[rank:] = 0
    torch.testing.assert_close(U @ V, u * s @ v, rtol=0, atol=1e-12)
    torch.testing.assert_close(U.norm(dim=0), V.norm(dim=1), rtol=0, atol=1e-12)  # shared equally
    assert (U.norm(dim=0).diff() <= 1e-12).all()  # the largest first


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_with_room_the_average_of_the_products_is_exact_in_every_round(weighting: str) -> None:
    p = regression_problem(rank=12, client_rank=0)  # 2 trained and 10 for the residual
    sizes = torch.tensor(p.source.sizes if weighting == "size" else [1, 1, 1], dtype=torch.float64)
    for done in rounds_of(FedExLoRA(p.layout, lr=0.1, trained_rank=2), p, rounds=4, weighting=weighting):
        assert error(p, done, sizes / sizes.sum()) < 1e-12
    homlora = rounds_of(HomLoRA(p.layout, lr=0.1), p, rounds=1, weighting=weighting)[0]
    assert error(p, homlora, sizes / sizes.sum()) > 1e-3  # which averaged factors are not


def test_the_factors_themselves_are_averaged() -> None:
    p = regression_problem(rank=12, client_rank=0)
    method = FedExLoRA(p.layout, lr=0.1, trained_rank=2)
    for done in rounds_of(method, p, rounds=2):
        expected = method.cut(done.before.x).mean(0).expand(3, -1)
        torch.testing.assert_close(method.cut(done.served.x), expected, rtol=0, atol=1e-12)


def test_more_room_is_nearer_to_exact() -> None:
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    errors = []
    for room in (0, 1, 2, 4):
        p = regression_problem(rank=2 + room, client_rank=0)
        whole = regression_problem(rank=2, client_rank=0)
        views = whole.layout.unpack(whole.x)
        x = torch.zeros(3, p.layout.size, dtype=torch.float64)
        method = FedExLoRA(p.layout, lr=0.1, trained_rank=2)
        p = p._replace(x=method.joined(x, whole.layout.pack(views)))  # the same start for each
        errors.append(error(p, rounds_of(method, p, rounds=1)[0], third))
    assert errors[0] > errors[1] > errors[2] > errors[3] and errors[3] < 1e-12  # of 3 clients: rank 2·3 − 2


def test_without_room_it_is_homlora() -> None:
    p = regression_problem(rank=4, client_rank=0)
    ours = rounds_of(FedExLoRA(p.layout, lr=0.05, trained_rank=4), p, rounds=3)
    for one, other in zip(ours, rounds_of(HomLoRA(p.layout, lr=0.05), p, rounds=3)):
        torch.testing.assert_close(one.served.x, other.served.x, rtol=0, atol=1e-14)


def test_only_the_first_ranks_are_trained_sent_and_counted() -> None:
    p = tiny_problem("roberta", rank=6, head="shared", client_rank=0)
    method = FedExLoRA(p.layout, lr=0.05, trained_rank=2)
    state = method.init(p.x, p.y)
    rest = method.joined(state.x, torch.zeros_like(method.cut(state.x)))
    assert rest.abs().max() == 0 < method.cut(state.x).abs().max()  # the residual begins at nothing
    third, head = p.layout.adapter_size // 3, p.layout.head_size
    assert method.trained_numbers(state) == [third] * 3
    assert method.sent_numbers(state, 1) == [third + head] * 3 and method.arrives(1).size == p.layout.shared
    first, second = rounds_of(method, p, rounds=2)
    for name, before in p.layout.unpack(second.before.x).items():
        served, entry = p.layout.unpack(first.served.x)[name], p.layout.by_name[name]
        if entry.kind != "head":
            axis = 1 if entry.kind == "A" else 2
            assert torch.equal(
                before.narrow(axis, 2, 4), served.narrow(axis, 2, 4)
            )  # no step moves the residual
            assert (before.narrow(axis, 0, 2) != served.narrow(axis, 0, 2)).any()


def test_it_says_what_the_residual_costs() -> None:
    p = regression_problem(rank=6, client_rank=0)
    (line,) = FedExLoRA(p.layout, trained_rank=2).notes()
    assert line == "with its residual, what comes back and what a client holds is 3 times the adapter"
    assert FedExLoRA(p.layout, trained_rank=6).notes() == FedExLoRA(p.layout).notes() == []


def test_the_adapter_has_room_for_the_residual() -> None:
    assert FedExLoRA.adapter_ranks(8, 2, {}) == (32, 0)
    assert FedExLoRA.adapter_ranks(8, 2, {"residual_rank": 3}) == (11, 0)
    assert FedExLoRA.adapter_ranks(8, 2, {"rank": 4, "residual_rank": 0}) == (4, 0)
    with pytest.raises(UserError, match="residual_rank is -1; it must be at least 0"):
        FedExLoRA.adapter_ranks(8, 2, {"residual_rank": -1})
    p = regression_problem(rank=5, client_rank=0)
    assert replace(FedExLoRA(p.layout), trained_rank=2).leaves(1).size < p.layout.shared
