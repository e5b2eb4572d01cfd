"""FlexLoRA: what the server makes of the clients' factors, against the dense matrix's SVD, in float64."""

from __future__ import annotations

import pytest
import torch
from test_methods import run
from tiny import Problem, build, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.ranks import truncated_svd
from pf2lora.errors import UserError
from pf2lora.methods.flexlora import FlexLoRA

RANKS = (1, 3, 4)


def products(p: Problem, x: Tensor) -> list[Tensor]:
    """BA of every layer, per client."""
    views = p.layout.unpack(x)
    return [views[B.name] @ views[A.name] for B, A in p.layout.pairs("B", "A")]


def cut(dense: Tensor, rank: int) -> Tensor:
    """The best approximation of a dense matrix in a rank."""
    U, S, Vh = torch.linalg.svd(dense, full_matrices=False)
    return U[:, :rank] * S[:rank] @ Vh[:rank]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [(4, 4, 4), RANKS])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_a_client_gets_the_mean_of_the_products_cut_to_its_rank(
    ranks: tuple[int, ...], weighting: str
) -> None:
    p = regression_problem(client_rank=0)
    done = run(FlexLoRA(p.layout, ranks=ranks), p, rounds=2, weighting=weighting)[-1]
    if weighting == "size":
        weights = torch.tensor([7, 12, 3], dtype=torch.float64) / 22
    else:
        weights = torch.ones(3, dtype=torch.float64) / 3
    for before, served in zip(products(p, done.before.x), products(p, done.served.x), strict=True):
        dense = torch.einsum("k,kmn->mn", weights, before)
        for k, rank in enumerate(ranks):
            assert torch.linalg.matrix_rank(before[k]) <= rank
            close(served[k], cut(dense, rank))
    head = done.before.x[:, p.layout.offsets["head.bias"] :]
    close(done.served.x[:, p.layout.offsets["head.bias"] :], (weights @ head).expand(3, -1))


def test_one_clients_product_comes_back_as_it_was() -> None:
    p = tiny_problem("roberta", sizes=(6,), client_rank=0)
    done = run(FlexLoRA(p.layout, ranks=(4,)), p, rounds=1)[0]
    for before, served in zip(products(p, done.before.x), products(p, done.served.x), strict=True):
        close(served, before)


def test_directions_nobody_uses_yet_can_be_learned() -> None:
    """A of a client with a larger rank than all who took part is orthonormal, and its B zero: not both are zero."""
    p = regression_problem(client_rank=0)
    method = FlexLoRA(p.layout, ranks=RANKS)
    lonely = build("flexlora", p._replace(x=p.x[:1]), ranks=(1,))
    _, sent = lonely.send(lonely.init(p.x[:1], p.y[:1]), 1)  # one client of rank 1 took part
    served = method.receive(method.init(p.x, p.y), method.average(sent, torch.ones(1)), 1)
    views = p.layout.unpack(served.x)
    for B, A in p.layout.pairs("B", "A"):
        close(views[A.name][2] @ views[A.name][2].mT, torch.eye(4, dtype=torch.float64))
        assert not views[B.name][2][:, 1:].abs().max() > 1e-12
        assert not views[A.name][0][1:].any()  # the client of rank 1 has none of them


def test_the_optimizer_begins_anew_and_what_is_cut_off_stays_zero() -> None:
    p = regression_problem(client_rank=0)
    method = FlexLoRA(p.layout, ranks=RANKS)
    done = run(method, p)[-1]
    assert (done.before.opt.moments.step == 2).all() and not done.served.opt.moments.step.any()
    for state in (done.before, done.served):
        assert torch.equal(state.x, state.x * method.kept(state.opt.rank, state.x))
    full, cut_off = method.sent_numbers(done.served, 3)[2], method.sent_numbers(done.served, 3)[0]
    assert full == p.layout.shared and cut_off == 2 * (6 + 5) + 5  # two layers of rank 1, and the head


def test_a_decomposition_without_the_dense_matrix() -> None:
    random = torch.Generator().manual_seed(0)
    down, up = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((3, 9), (7, 3)))
    U, S, V = truncated_svd(torch.cat([down, torch.zeros(4, 9)]), torch.cat([up, torch.zeros(7, 4)], 1), 5)
    close(U * S @ V.mT, up @ down)
    for factor in (U, V):
        close(factor.mT @ factor, torch.eye(5, dtype=torch.float64))
    close(S[:3], torch.linalg.svdvals(up @ down)[:3])
    again = truncated_svd(-torch.cat([down, torch.zeros(4, 9)]), -torch.cat([up, torch.zeros(7, 4)], 1), 3)
    close(again[0], U[:, :3])
    close(again[2], V[:, :3])


def test_every_client_needs_a_rank() -> None:
    p = regression_problem()
    with pytest.raises(UserError, match="FlexLoRA has 2 first ranks for 3 clients"):
        FlexLoRA(p.layout, ranks=(1, 2)).init(p.x, p.y)
