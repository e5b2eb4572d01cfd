"""The kernels of short attention in real steps, which need a CUDA device with Triton."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted_attention import DTYPES, compare, padding, random_heads, with_gradients
from stand_in_graphs import stepper_of
from tiny import CONFIGS, tiny_model, tiny_problem
from torch import Tensor

from pf2lora.adapters import short_attention
from pf2lora.adapters.short_attention import NAME
from pf2lora.core.method import gradients, variable
from pf2lora.core.second_order import differentiable_twice
from pf2lora.engines.batches import EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.methods.homlora import HomLoRA

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and short_attention.HAS_TRITON), reason="needs a CUDA device and Triton"
)
DEVICE = torch.device("cuda")
# Every side of a tile with every size of a head that models have with it; Triton takes seconds to build each.
SHAPES = [(7, 16), (16, 64), (33, 32), (64, 64), (96, 64), (128, 32), (128, 64), (128, 128)]


def torchs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    mask = None if bias is None else bias[:, None, None, :].expand(-1, 1, q.shape[2], -1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("length", "size"), SHAPES)
@pytest.mark.parametrize("name", DTYPES)
def test_the_kernels_are_as_exact_as_torchs(name: str, length: int, size: int, padded: bool) -> None:
    """Against attention in float64; a second call gives the same bits."""
    torch.manual_seed(length + size)
    dtype, examples = DTYPES[name], 5
    inputs = random_heads(examples, length, 3, size, dtype, "cuda")
    bias = padding(examples, length, dtype, "cuda") if padded else None
    found = compare(inputs, bias, short_attention.short_attention, torchs)
    for ours, theirs in zip(found["ours"], found["torch"]):
        assert ours < {"bfloat16": 1e-2, "float16": 1.5e-3}[name]
        assert ours <= 1.5 * theirs + 1e-4
    weights = torch.randn_like(inputs[0].transpose(1, 2))
    first, second = (
        with_gradients(lambda q, k, v: short_attention.short_attention(q, k, v, bias, 0.2), inputs, weights)
        for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def problem(kind: str, dtype: torch.dtype, multiple: int = 1) -> Any:
    """A tiny model whose heads are as small as the kernels take; batches are filled up to a `multiple` of tokens."""
    config = copy.deepcopy(CONFIGS[kind])
    config.hidden_size, config.num_attention_heads = 32, 2
    model = tiny_model(kind, dtype=dtype, config=config).to(DEVICE)  # type: ignore[arg-type]
    p = tiny_problem(kind, model=model)
    assert p.model is not None and isinstance(p.source, EncodedSource)
    data = replace(p.source.data.to(DEVICE), pad_to_multiple_of=multiple)
    source = replace(p.source, data=data)
    return p._replace(x=p.x.float().to(DEVICE), y=p.y.float().to(DEVICE), source=source)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that the forward kernel was called with, recorded or not."""
    from pf2lora.adapters import short_attention_kernels as kernels

    found, forward = list[torch.Size](), kernels.forward

    def noted(q: Tensor, *others: Any) -> Tensor:
        found.append(q.shape)
        return forward(q, *others)

    monkeypatch.setattr(kernels, "forward", noted)
    return found


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "xlm-roberta"])
def test_a_models_loss_and_gradients_are_as_with_torchs_attention(kind: str, calls: list[torch.Size]) -> None:
    """Padded and full batches, with gradients and without, in float16, which adds less noise than bfloat16; float32
    is torch's."""
    p = problem(kind, torch.float16)
    padded = p.source.draw([0, 1, 2], [0, 0, 0])
    for batch in (padded, replace(padded, full=True)):

        def losses_and_gradients(batch: Any = batch) -> list[Tensor]:
            x, y = variable(p.x), variable(p.y)
            losses = p.F(x, y, batch)
            return [losses.detach(), *gradients(losses, x, y)]

        ours, called = losses_and_gradients(), len(calls)
        assert called and p.model.model.config._attn_implementation == NAME
        with torch.no_grad():
            torch.testing.assert_close(p.F(p.x, p.y, batch), ours[0], rtol=1e-2, atol=1e-2)
        assert len(calls) > called
        called = len(calls)
        with differentiable_twice():
            exact = losses_and_gradients()
        assert len(calls) == called
        for one, other in zip(ours, exact):
            assert (one - other).norm() < 3e-2 * other.norm()
        calls.clear()
    in_float32 = problem(kind, torch.float32)
    in_float32.F(in_float32.x, in_float32.y, padded)
    assert not calls


@pytest.mark.parametrize(("kind", "compiled"), [("bert", False), ("roberta", False), ("roberta", True)])
def test_steps_with_the_kernels_are_recorded(
    kind: str, compiled: bool, calls: list[torch.Size], caplog: pytest.LogCaptureFixture
) -> None:
    """No step falls back, and the numbers are the plain steps' up to AdamW's steps of a rounding; compiled passes take
    the operation as it is."""
    torch.compiler.reset()
    ends = []
    for graphs in (False, True):
        p = problem(kind, torch.bfloat16, multiple=12 if compiled else 1)  # one length to compile for
        if compiled:
            p.model.compile()
        calls.clear()
        method = HomLoRA(p.layout)
        state = method.init(p.x, p.y)
        how = stepper_of(p.F, graphs)
        *_, last = train(method, p.F, state, p.source, Schedule(3, 4), device=DEVICE, stepper=how)
        assert calls
        ends.append(last.served.x.cpu())
    for said in ("without a CUDA graph", "compiler failed", "Triton"):
        assert said not in caplog.text
    moved = (ends[0] - p.x.cpu()).abs().mean()
    assert (ends[0] - ends[1]).abs().mean() < 0.1 * moved
