"""Attention of short texts: the kernels by Triton's interpreter, and where torch's attention is kept."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CONFIGS, tiny_problem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pf2lora.adapters import short_attention
from pf2lora.adapters.architectures import ARCHITECTURES, needed_mask, packed_mask
from pf2lora.adapters.short_attention import NAME, applies, attention
from pf2lora.core.second_order import differentiable_twice

HELPER = Path(__file__).parents[1] / "helpers" / "interpreted_attention.py"
BERT = ARCHITECTURES["bert"]


@pytest.mark.skipif(not short_attention.HAS_TRITON, reason="the kernels need Triton")
def test_the_kernels_by_their_formula() -> None:
    """Output and gradients within the rounding of 16 bits: lengths that fill a tile or not, heads of all sizes, with
    and without padding, strided inputs. The interpreter rounds bfloat16 towards zero, so that its errors are larger."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, HELPER], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["size"] for row in rows} == set(short_attention.HEAD_SIZES)
    assert {row["length"] for row in rows} >= {1, 7, 33, short_attention.LONGEST}
    for row in rows:
        bound = {"bfloat16": 1e-2, "float16": 1e-3}[row["dtype"]]
        assert all(error < bound for error in row["ours"]), row


def heads(
    *, length: int = 32, size: int = 16, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> list[Tensor]:
    shape = 2, length, 3, size
    return [torch.empty(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(3)]


def of_tokens() -> Tensor:
    return torch.ones(2, 32, dtype=torch.long)


def chosen(mask: Any = None, *, dropout: float = 0.0, causal: bool = False, **heads_of: Any) -> bool:
    """What the chooser says of heads that have no numbers and claim to be on CUDA."""
    with FakeTensorMode():
        ready = mask() if mask else None
        q, k, v = heads(**heads_of)
        return applies(q, k, v, ready, dropout=dropout, causal=causal)


def test_where_the_kernels_apply() -> None:
    def padded() -> Tensor | None:
        return needed_mask(BERT, of_tokens(), torch.bfloat16)

    assert chosen() and chosen(padded) and chosen(length=128, size=128) and chosen(length=1)
    assert chosen(dtype=torch.float16) and chosen(lambda: torch.zeros(2, 1, 1, 32))


@pytest.mark.parametrize(
    "otherwise",
    [
        {"device": "cpu"},
        {"device": "meta"},
        {"dtype": torch.float32},
        {"dtype": torch.float64},
        {"length": 129},
        {"size": 24},
        {"size": 256},
        {"dropout": 0.1},
        {"causal": True},
        {"mask": lambda: packed_mask(of_tokens(), torch.bfloat16)},  # differs between queries
        {"mask": lambda: torch.zeros(2, 3, 1, 32)},  # between heads
        {"mask": lambda: torch.zeros(1, 1, 1, 1)},
        {"mask": lambda: torch.ones(2, 1, 1, 32, dtype=torch.bool)},  # not to be added
        {"mask": lambda: torch.zeros(2, 1, 1, 32, requires_grad=True)},
    ],
)
def test_where_attention_stays_torchs(otherwise: dict[str, Any]) -> None:
    assert not chosen(**otherwise)


def test_a_gradient_that_is_differentiated_twice_is_torchs() -> None:
    with differentiable_twice():
        assert not chosen()
    assert chosen()


@pytest.mark.parametrize("others", [{}, {"position_bias": True}, {"is_causal": True}, {"dropout": 0.5}])
def test_what_the_kernels_do_not_know_is_handed_to_torch(
    others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def noted(*_: Any, **options: Any) -> tuple[None, None]:
        asked.append(options)
        return None, None

    monkeypatch.setattr(short_attention, "sdpa_attention_forward", noted)
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    with FakeTensorMode():
        q, k, v = heads()
        out, _ = attention(module, q, k, v, None, scaling=0.5, **others)
    if others:
        assert [{k: v for k, v in one.items() if v} for one in asked] == [{"scaling": 0.5, **others}]
    else:
        assert asked == [] and out.shape == (2, 32, 3, 16) and out.is_contiguous()


def test_the_operation_has_shapes_without_numbers() -> None:
    """As a recording is tried on the meta device: gradients are laid out as the model's own rows are."""
    q, k, v = (t.requires_grad_() for t in heads(device="meta"))
    bias = torch.zeros(2, 32, device="meta")
    out = torch.ops.pf2lora.short_attention(q, k, v, bias, 0.5)
    assert out.shape == (2, 32, 3, 16) and out.is_contiguous()
    for gradient, of in zip(torch.autograd.grad(out, (q, v), torch.empty_like(out)), (q, v)):
        assert gradient.shape == of.shape and gradient.stride() == of.stride()


@pytest.mark.parametrize(
    "kind", [kind for kind, a in ARCHITECTURES.items() if a.attention == "bidirectional"]
)
def test_the_models_numbers_on_a_cpu_are_torchs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's model keeps its implementation; under ours it has the same bits, padded and full."""
    p = tiny_problem(kind)
    assert p.model is not None
    base = p.model.model
    tokens = torch.randint(3, 50, (6, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([9, 3, 5, 1, 9, 7])[:, None]).long()
    before = base.config._attn_implementation

    def logits(mask: Tensor | None) -> Tensor:
        assert p.model is not None
        found: Tensor = p.model(p.x, p.y, input_ids=tokens, attention_mask=mask).logits
        return found

    expected = [logits(mask), logits(None)]
    assert base.config._attn_implementation == before == ("sdpa" if base._supports_sdpa else "eager")
    if before == "sdpa":
        base.set_attn_implementation(NAME)
        assert all(torch.equal(logits(m), found) for m, found in zip((mask, None), expected))
        torch.testing.assert_close(
            base(tokens, mask).logits, base(tokens, mask).logits
        )  # masks of transformers' own
        p.model.remove()
        assert base.config._attn_implementation == "sdpa"


def test_who_gets_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a bidirectional model in 16 bits whose heads fit, unless it was given another attention."""
    monkeypatch.setattr(short_attention, "works", lambda *_: True)
    config = copy.deepcopy(CONFIGS["roberta"])
    config.hidden_size, config.num_attention_heads = 32, 2

    def after(attention: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", **of: Any) -> str:
        problem = tiny_problem("roberta")
        assert problem.model is not None
        model = problem.model.model
        model.config = config if of.get("fits", True) else model.config
        model.config._attn_implementation = attention
        short_attention.take(model, dtype, torch.device(device))
        return str(model.config._attn_implementation)

    assert after("sdpa") == NAME and after("eager") == "eager"
    assert after("sdpa", torch.float32) == after("sdpa", device="cpu") == after("sdpa", fits=False) == "sdpa"
    monkeypatch.setattr(short_attention, "works", lambda *_: False)
    assert after("sdpa") == "sdpa"


def test_a_causal_model_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(short_attention, "take", lambda model, *_: asked.append(model.config.model_type))
    for kind in ("roberta", "gpt2"):
        p = tiny_problem(kind)
        p.F(p.x, p.y, p.source.draw([0, 1, 2], [0, 0, 0]))
    assert set(asked) == {"roberta"}


def test_kernels_that_cannot_be_built_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_compiler(*_: Any) -> Tensor:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(short_attention, "HAS_TRITON", True)
    monkeypatch.setattr(short_attention, "short_attention", without_compiler)
    asked = 16, torch.bfloat16, torch.device("cpu")
    assert not short_attention.works.__wrapped__(*asked)
    assert "is torch's, since Triton's failed: Failed to find C compiler. Please" in caplog.text
    monkeypatch.setattr(short_attention, "HAS_TRITON", False)
    assert not short_attention.works.__wrapped__(*asked) and len(caplog.records) == 1
