"""Our AdamW on rows is torch's AdamW on each row."""

from __future__ import annotations

import pytest
import torch

from pf2lora.core.optim import Moments, adamw, no_moments


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_many_steps_equal_torchs(dtype: torch.dtype, tolerance: float, weight_decay: float) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, generator=random, dtype=dtype)
    references = [row.clone().requires_grad_() for row in x]
    optimizers = [torch.optim.AdamW([r], lr=0.02, weight_decay=weight_decay) for r in references]
    moments = no_moments(x)
    for _ in range(200):
        gradient = torch.randn(3, 7, generator=random, dtype=dtype) * torch.tensor([[1e-6], [1.0], [1e3]]).to(
            dtype
        )
        x, moments = adamw(gradient, moments, x, 0.02, weight_decay=weight_decay)
        for reference, optimizer, g in zip(references, optimizers, gradient):
            reference.grad = g.clone()
            optimizer.step()
        torch.testing.assert_close(x, torch.stack([r.detach() for r in references]), rtol=0, atol=tolerance)


def test_the_first_step_in_float32_is_as_exact_as_torchs() -> None:
    """1 − 0.999 in float32 is off by 1e-5; torch computes the bias corrections in double precision."""
    x, gradient = torch.zeros(1, 1), torch.ones(1, 1)
    reference = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([reference], lr=1.0, weight_decay=0.0)
    reference.grad = gradient[0].clone()
    optimizer.step()
    moved, _ = adamw(gradient, no_moments(x), x, 1.0, weight_decay=0.0)
    assert moved.item() == pytest.approx(reference.item(), rel=1e-6)


def test_a_client_that_skipped_steps_keeps_its_own_count() -> None:
    random = torch.Generator().manual_seed(0)
    start, gradients = (
        torch.randn(2, 5, generator=random).double(),
        torch.randn(4, 2, 5, generator=random).double(),
    )
    x, moments = start, no_moments(start)
    for g in gradients:
        x, moments = adamw(g, moments, x, 0.1)
    late, fresh = start[1:], no_moments(start[1:])
    late, fresh = adamw(gradients[0, 1:], fresh, late, 0.1)
    # row 0 has made four steps, row 1 one: a common step must treat each by its own count
    together = Moments(*(torch.cat([a[:1], b]) for a, b in zip(moments, fresh)))
    both, after = adamw(gradients[1], together, torch.cat([x[:1], late]), 0.1)
    alone, _ = adamw(gradients[1, 1:], fresh, late, 0.1)
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=1e-15)
    assert after.step.flatten().tolist() == [5, 2]


def test_nothing_is_changed_in_place() -> None:
    x, gradient = torch.ones(2, 3), torch.ones(2, 3)
    moments = no_moments(x)
    adamw(gradient, moments, x, 0.1)
    assert torch.equal(x, torch.ones(2, 3)) and torch.equal(gradient, torch.ones(2, 3))
    assert all(not part.any() for part in moments)
