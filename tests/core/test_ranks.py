"""Ranks and sizes of adapter products, against dense matrices."""

from __future__ import annotations

import pytest
import torch

from pf2lora.core.layout import Entry, Kind, Layout
from pf2lora.core.ranks import (
    Adapters,
    client_share,
    learned_ranks,
    ninety_percent_rank,
    product_norm,
    reduced_rank_regression,
    singular_values,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_modules(down: Kind, up: Kind, rank: int) -> Layout:
    entries = [
        Entry(module, kind, shape)
        for module, n, m in (("q", 7, 5), ("v", 4, 9))
        for kind, shape in ((down, (rank, n)), (up, (m, rank)))
    ]
    return Layout(tuple(entries), shared=0)


@pytest.mark.parametrize("shape", [(9, 2, 6), (3, 5, 4), (4, 5, 12)])  # m, R, n: also R above m or n
def test_singular_values_are_those_of_the_dense_product(shape: tuple[int, int, int]) -> None:
    m, R, n = shape
    down, up = normal(2, 3, R, n), normal(2, 3, m, R, seed=1)
    dense = torch.linalg.svdvals(up @ down)
    found = singular_values(down, up)
    torch.testing.assert_close(found, dense[..., : found.shape[-1]])
    assert dense[..., found.shape[-1] :].sum() < 1e-12


def test_ninety_percent_rank_follows_the_papers_rule() -> None:
    values = torch.tensor([[5.0, 4, 1], [5, 3.9, 1.1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    assert ninety_percent_rank(values).tolist() == [2, 3, 1, 0, 3]
    assert ninety_percent_rank(torch.full((10,), 0.1)).item() == 9  # nine of ten equal ones are 90%


def test_learned_ranks_and_share_against_dense_matrices() -> None:
    layout_x, layout_y = two_modules("A", "B", 3), two_modules("C", "D", 2)
    x, y = normal(4, layout_x.size), normal(4, layout_y.size, seed=1)
    common, own = layout_x.unpack(x), layout_y.unpack(y)
    BA = [0.5 * common[f"{m}.B"] @ common[f"{m}.A"] for m in "qv"]
    DC = [3.0 * own[f"{m}.D"] @ own[f"{m}.C"] for m in "qv"]
    expected = torch.stack([ninety_percent_rank(torch.linalg.svdvals(a + b)) for a, b in zip(BA, DC)], dim=1)
    assert torch.equal(learned_ranks(Adapters(layout_x, layout_y, x, y, 0.5, 3.0)), expected)

    def total(products: list[torch.Tensor]) -> torch.Tensor:
        return sum(torch.linalg.matrix_norm(p).square() for p in products).sqrt()

    torch.testing.assert_close(
        client_share(Adapters(layout_x, layout_y, x, y, 0.5, 3.0)), total(DC) / total(BA)
    )


def test_a_start_at_zero_has_rank_zero_and_no_share() -> None:
    layout_x, layout_y = two_modules("A", "B", 3), two_modules("C", "D", 2)
    x, y = torch.zeros(2, layout_x.size), torch.zeros(2, layout_y.size)
    assert learned_ranks(Adapters(layout_x, layout_y, x, y)).tolist() == [[0, 0], [0, 0]]
    assert client_share(Adapters(layout_x, layout_y, x, y)).isnan().all()


def test_without_client_adapters_the_rank_is_that_of_the_common_one() -> None:
    layout, nothing = two_modules("A", "B", 3), Layout((), 0)
    x = normal(2, layout.size)
    views = layout.unpack(x)
    expected = [ninety_percent_rank(torch.linalg.svdvals(views[f"{m}.B"] @ views[f"{m}.A"])) for m in "qv"]
    assert torch.equal(learned_ranks(Adapters(layout, nothing, x, x[:, :0])), torch.stack(expected, 1))
    assert client_share(Adapters(layout, nothing, x, x[:, :0])).tolist() == [0, 0]


def test_product_norm_is_the_frobenius_norm() -> None:
    down, up = normal(3, 2, 7), normal(3, 5, 2, seed=1)
    torch.testing.assert_close(product_norm(down, up), torch.linalg.matrix_norm(up @ down))


def test_reduced_rank_regression_is_optimal() -> None:
    """Its fit error is the truncated part of the least-squares fit; small moves at the same rank do not improve it."""
    X, Y = normal(50, 6), normal(50, 5, seed=1)
    for rank in (1, 3):
        W = reduced_rank_regression(X, Y, rank)
        assert torch.linalg.matrix_rank(W) == rank
        fit = X @ reduced_rank_regression(X, Y, 5)
        lost = torch.linalg.svdvals(fit)[rank:].square().sum()
        best = (X @ W - Y).square().sum()
        torch.testing.assert_close(best, (fit - Y).square().sum() + lost)
        U, S, Vh = torch.linalg.svd(W)
        for seed in range(20):
            left = U[:, :rank] * S[:rank] + 1e-2 * normal(6, rank, seed=seed)
            right = Vh[:rank] + 1e-2 * normal(rank, 5, seed=100 + seed)
            assert (X @ left @ right - Y).square().sum() > best
