"""Operations of our own on an accelerator: an addition where a product lies, and a loss with its slope."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from pf2lora.adapters.in_place import adapted_linear
from pf2lora.adapters.output_layer import loss_and_slope


def written_out(u: Tensor, weight: Tensor, bias: Tensor | None, inner: Tensor, up: Tensor) -> Tensor:
    out = linear(u, weight, bias)
    return out + (inner @ up.mT).view_as(out)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_an_addition_in_place(biased: bool, transposed: bool) -> None:
    """Value and gradients in float64, with GPT-2's transposed weights too; torch's own checks of an operation."""
    torch.manual_seed(0)
    clients, rows, n, m, rank = 3, 4, 8, 6, 2

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    weight = random(n, m).mT if transposed else random(m, n)
    bias = random(m) if biased else None
    u, inner, up = (
        random(*shape).requires_grad_()
        for shape in ((clients * rows, n), (clients, rows, rank), (clients, m, rank))
    )
    weights = random(clients * rows, m)
    ours = adapted_linear(u, weight, bias, inner, up)
    expected = written_out(u, weight, bias, inner, up)
    torch.testing.assert_close(ours, expected)
    for one, other in zip(
        *(torch.autograd.grad((out * weights).sum(), (u, inner, up)) for out in (ours, expected))
    ):
        torch.testing.assert_close(one, other)
    torch.library.opcheck(adapted_linear, (u, weight, bias, inner, up))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_loss_and_its_slope(softcap: float | None) -> None:
    """By autograd on the written-out loss, in float64; what fills the vocabulary up has no slope."""
    torch.manual_seed(0)
    raw, wanted = torch.randn(6, 16, dtype=torch.float64), torch.randint(0, 13, (6,))
    variable = raw.clone().requires_grad_()
    bounded = variable if softcap is None else torch.tanh(variable / softcap) * softcap
    expected = torch.nn.functional.cross_entropy(bounded[:, :13], wanted, reduction="none")
    (slope,) = torch.autograd.grad(expected.sum(), variable)
    losses, ours = loss_and_slope(raw.clone(), wanted, 13, softcap, torch.float64, True)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(ours, slope)
    assert loss_and_slope(raw.clone(), wanted, 13, softcap, torch.float64, False)[1] is None
