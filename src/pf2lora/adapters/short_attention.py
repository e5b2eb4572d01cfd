"""Attention of short texts on CUDA as one operation: what fits into one tile needs no passes over blocks.

Torch's fused kernels are made for long texts; of 128 tokens at most, a head's scores are a single tile, and forward and
backward each read and write every number once (`short_attention_kernels.py`). The kernels are Triton's; wherever they
do not apply, attention is torch's.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pf2lora.core.failures import ran_out
from pf2lora.core.second_order import is_differentiated_twice
from pf2lora.errors import one_line

logger = logging.getLogger("pf2lora")
NAME = "pf2lora_short"  # among transformers' implementations of attention
LONGEST = 128
HEAD_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None
ONLY_TORCHS = (
    "position_bias",
    "softcap",
    "cache",
    "output_attentions",
)  # arguments that the kernels do not know


@torch.library.custom_op("pf2lora::short_attention", mutates_args=())
def short_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """`softmax(scale q kᵀ + bias) v` (B, T, H, D) of q, k and v (B, H, T, D) with a bias of each key (B, T)."""
    from pf2lora.adapters.short_attention_kernels import forward

    return forward(by_rows(q), by_rows(k), by_rows(v), bias, scale)


@short_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    b, h, t, d = q.shape
    return q.new_empty(b, t, h, d)


@torch.library.custom_op("pf2lora::short_attention_backward", mutates_args=())
def short_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v, laid out like the output (B, T, H, D)."""
    from pf2lora.adapters.short_attention_kernels import backward

    return backward(by_rows(gradient), by_rows(q), by_rows(k), by_rows(v), bias, scale)


@short_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, t, d = q.shape
    return q.new_empty(b, t, h, d), q.new_empty(b, t, h, d), q.new_empty(b, t, h, d)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = short_attention_backward(gradient, *ctx.saved_tensors, ctx.scale)
    needed = zip(found, ctx.needs_input_grad)
    return *(g.transpose(1, 2) if wanted else None for g, wanted in needed), None, None


torch.library.register_autograd("pf2lora::short_attention", _backward, setup_context=_keep)


def by_rows(t: Tensor) -> Tensor:
    """The kernels take any strides but that of a head's numbers, which lie side by side, as they do in a model."""
    return t if t.stride(-1) == 1 else t.contiguous()


def applies(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, causal: bool
) -> bool:
    """Whether attention of these (B, H, T, D) is the kernels'. A mask must be one of keys alone, to be added."""
    examples, _, length, size = query.shape
    of_keys = mask is None or (
        mask.dim() == 4
        and mask.is_floating_point()
        and (mask.shape[2] == 1 or mask.stride(2) == 0)
        and mask.shape[1] == 1
        and (mask.shape[0], mask.shape[3]) == (examples, length)
        and not mask.requires_grad
    )
    return (
        query.is_cuda
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape == key.shape == value.shape
        and length <= LONGEST
        and size in HEAD_SIZES
        and of_keys
        and not dropout
        and not causal
        # What is compiled is differentiated once, and the compiler cannot read the context.
        and (torch.compiler.is_compiling() or not is_differentiated_twice())
    )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: the kernels where they apply, else torch's attention as without them."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    known = not any(others.get(name) is not None and others[name] is not False for name in ONLY_TORCHS)
    if known and applies(query, key, value, attention_mask, dropout=dropout, causal=causal):
        bias = None if attention_mask is None else attention_mask[:, 0, 0]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return short_attention(query, key, value, bias, scale), None
    options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return found


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def take(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Give a bidirectional model the kernels in place of torch's fused ones, on CUDA in 16 bits."""
    if model.config._attn_implementation == "sdpa" and device.type == "cuda" and dtype in DTYPES:
        size = model.config.hidden_size // model.config.num_attention_heads
        if size in HEAD_SIZES and works(size, dtype, device):
            model.set_attn_implementation(NAME)


def leave(model: PreTrainedModel) -> None:
    """Give the model torch's attention back."""
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")


@cache
def works(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can be built here (Triton needs a C compiler) and the largest tile fits the device."""
    if not HAS_TRITON:
        return False
    q = torch.zeros(1, 1, LONGEST, size, dtype=dtype, device=device)
    bias = q.new_zeros(1, LONGEST)
    try:
        out = short_attention(q, q, q, bias, 1.0)
        short_attention_backward(out, q, q, q, bias, 1.0)
    except Exception as error:
        if ran_out(error):
            raise
        logger.warning(
            "attention of short texts is torch's, since Triton's failed: %s", one_line(str(error))[:300]
        )
        return False
    return True
