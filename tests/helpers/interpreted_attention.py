"""The kernels of short attention, run by Triton's interpreter on the CPU, beside attention in float64.

`TRITON_INTERPRET` is read when Triton is imported, so this is a process of its own; it prints a row for each case with
the relative error of the output and of each gradient, and torch's own in the same precision.
"""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pf2lora.adapters.short_attention import short_attention

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The attention (B, T, H, D) by its formula, in the precision of what comes in."""
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias[:, None, None, :].to(scores)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def random_heads(
    examples: int, length: int, heads: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """q, k and v as a model has them: views (B, H, T, D) of rows (B, T, H·D). k's rows lie in wider ones."""
    widths = (heads * size, 2 * heads * size, heads * size)
    wide = [torch.randn(examples, length, w, device=device).to(dtype) for w in widths]
    cut = [t[..., : heads * size].unflatten(-1, (heads, size)).transpose(1, 2) for t in wide]
    return [t.detach().requires_grad_() for t in cut]


def padding(examples: int, length: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """The bias (B, T) of texts of different lengths, each with a token."""
    lengths = torch.linspace(1, length, examples, device=device).long()
    outside = torch.arange(length, device=device) >= lengths[:, None]
    return torch.zeros(examples, length, device=device, dtype=dtype).masked_fill(
        outside, torch.finfo(dtype).min
    )


def with_gradients(attend: Any, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights.to(out.dtype))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative, of each tensor as a whole; a single token's gradients by q and k are zero."""
    return [float((f.double() - e).norm() / (e.norm() if e.norm() else 1)) for f, e in zip(found, exact)]


def compare(inputs: list[Tensor], bias: Tensor | None, attend: Any, torchs: Any) -> dict[str, list[float]]:
    """The errors of the output and the gradients by q, k and v, of ours and of torch's."""
    scale = 1.3 / math.sqrt(inputs[0].shape[-1])  # no model's own
    weights = torch.randn_like(inputs[0].transpose(1, 2), dtype=torch.float32).to(inputs[0].dtype)
    in_float64 = [t.detach().double().requires_grad_() for t in inputs]
    exact = with_gradients(lambda q, k, v: written_out(q, k, v, bias, scale), in_float64, weights)
    return {
        "ours": errors(with_gradients(lambda q, k, v: attend(q, k, v, bias, scale), inputs, weights), exact),
        "torch": errors(with_gradients(lambda q, k, v: torchs(q, k, v, bias, scale), inputs, weights), exact),
    }


def products_of_bfloat16() -> None:
    """The interpreter holds bfloat16 as integers of 16 bits, and multiplies these."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    plain = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *others: plain(self, widened(a), widened(b), *others)


def main() -> None:
    products_of_bfloat16()
    torch.manual_seed(0)
    lengths_and_sizes = [(1, 16), (7, 16), (16, 32), (32, 64), (33, 64), (96, 32), (128, 64), (128, 128)]
    for name, (length, size), padded in product(DTYPES, lengths_and_sizes, (False, True)):
        dtype, heads = DTYPES[name], 2
        examples = 3 if padded else 1
        bias = padding(examples, length, dtype) if padded else None
        inputs = random_heads(examples, length, heads, size, dtype)
        row = {"dtype": name, "length": length, "size": size, "padded": padded}
        print(json.dumps(row | compare(inputs, bias, short_attention, written_out)), flush=True)


if __name__ == "__main__":
    main()
