# mypy: allow-untyped-defs
"""Triton kernels of `short_attention.py`: a program for each head of each example, whose scores it holds as one tile.

Nothing is kept between forward and backward, and no two programs write to one place, so results are the same bits each
time. This module needs Triton, which a torch without CUDA does not bring along.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)  # powers of two are cheaper than those of e
SMALLEST = 16  # the least side of a product on tensor cores
# What Triton is told of a kernel, by the tile's side; "maxnreg" would bound a thread's registers.
FORWARD: dict[int, dict[str, int]] = {16: {}, 32: {}, 64: {}, 128: {"num_warps": 8, "maxnreg": 128}}
BACKWARD: dict[int, dict[str, int]] = {16: {}, 32: {}, 64: {}, 128: {}}


@triton.jit
def rows(at, strides_b, strides_h, strides_t, b, h, t, d, inside):
    """One head of one example (T, D), zero in the rows that fill the tile up."""
    place = at + b * strides_b + h * strides_h + t[:, None] * strides_t + d[None, :]
    return tl.load(place, mask=inside[:, None], other=0.0)


@triton.jit
def exponents(q, k, bias, b, stride_b, stride_t, t, inside, scale, MASKED: tl.constexpr):
    """The scores less the largest of their row, as exponents of 2; a key that is not there has none."""
    s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
    if MASKED:
        of_key = tl.load(bias + b * stride_b + t * stride_t, mask=inside, other=0.0).to(tl.float32)
        s += (tl.maximum(of_key, -1e30) * LOG2E)[None, :]  # finite, so that a row without any key is no NaN
    s = tl.where(inside[None, :], s, float("-inf"))
    return s - tl.max(s, 1)[:, None]


@triton.jit
def short_attention_forward(
    q_, k_, v_, bias, out, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mt, heads, length, scale,
    MASKED: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    t, d = tl.arange(0, T), tl.arange(0, D)
    inside = t < length
    q = rows(q_, qb, qh, qt, b, h, t, d, inside)
    k = rows(k_, kb, kh, kt, b, h, t, d, inside)
    v = rows(v_, vb, vh, vt, b, h, t, d, inside)
    p = tl.exp2(exponents(q, k, bias, b, mb, mt, t, inside, scale, MASKED))
    o = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]
    place = (b * length + t[:, None]) * (heads * D) + h * D + d[None, :]
    tl.store(out + place, o.to(v.dtype), mask=inside[:, None])


@triton.jit
def short_attention_backward(
    g_, q_, k_, v_, bias, dq_, dk_, dv_, gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mt, heads, length, scale,
    MASKED: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    t, d = tl.arange(0, T), tl.arange(0, D)
    inside = t < length
    place = (b * length + t[:, None]) * (heads * D) + h * D + d[None, :]
    q = rows(q_, qb, qh, qt, b, h, t, d, inside)
    k = rows(k_, kb, kh, kt, b, h, t, d, inside)
    g = rows(g_, gb, gh, gt, b, h, t, d, inside)
    p = tl.exp2(exponents(q, k, bias, b, mb, mt, t, inside, scale, MASKED))
    p = p / tl.sum(p, 1)[:, None]
    dv = tl.dot(tl.trans(p.to(g.dtype)), g)
    tl.store(dv_ + place, dv.to(g.dtype), mask=inside[:, None])
    v = rows(v_, vb, vh, vt, b, h, t, d, inside)
    dp = tl.dot(g, tl.trans(v))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
    dq = tl.dot(ds, k) * scale
    tl.store(dq_ + place, dq.to(q.dtype), mask=inside[:, None])
    dk = tl.dot(tl.trans(ds), q) * scale
    tl.store(dk_ + place, dk.to(q.dtype), mask=inside[:, None])


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The attention (B, T, H, D) of q, k and v (B, H, T, D), with what is added to each key's scores (B, T)."""
    out = new_rows(q)
    launch(short_attention_forward, FORWARD, (q, k, v), (out,), bias, scale)
    return out


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (B, T, H, D) by q, k and v, of the output's (B, T, H, D)."""
    dq, dk, dv = new_rows(q), new_rows(q), new_rows(q)
    inputs = gradient.transpose(1, 2), q, k, v
    launch(short_attention_backward, BACKWARD, inputs, (dq, dk, dv), bias, scale)
    return dq, dk, dv


def new_rows(q: Tensor) -> Tensor:
    b, h, t, d = q.shape
    return q.new_empty(b, t, h, d)


def launch(
    kernel: Any,
    options: dict[int, dict[str, int]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    bias: Tensor | None,
    scale: float,
) -> None:
    """A program for each head of each example, on the device that they are on."""
    b, h, t, d = inputs[0].shape
    side = max(SMALLEST, triton.next_power_of_2(t))
    steps = [step for tensor in inputs for step in tensor.stride()[:3]]
    of_bias = (0, 0) if bias is None else bias.stride()
    tile = {"MASKED": bias is not None, "T": side, "D": d} | options[side]
    with torch.cuda.device(inputs[0].device) if inputs[0].is_cuda else nullcontext():
        kernel[b * h,](*inputs, bias, *outputs, *steps, *of_bias, h, t, scale, **tile)
