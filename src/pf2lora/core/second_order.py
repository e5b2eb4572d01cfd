"""Passes that are differentiated twice: which attention kernel they need, and how a model can tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_twice: ContextVar[bool] = ContextVar("twice", default=False)


def is_differentiated_twice() -> bool:
    """Whether the pass at hand will be differentiated twice; compiled models have no double backward."""
    return _twice.get()


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """The math attention kernel: flash and memory-efficient attention have no double backward.

    Its products run in the base model's precision, as the fast kernels' do, and not in float32.
    """
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    token = _twice.set(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _twice.reset(token)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduced)
