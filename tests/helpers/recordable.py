"""Whether a step could be recorded as a CUDA graph, asked where there is no CUDA: torch's meta device stands for it.

Tensors there have a shape and no numbers. Whatever asks for one of these (`item`, `nonzero`) fails by itself, as it
does while a stream is recorded; what copies between the host and the device is noted here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny import tiny_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from pf2lora.engines.batches import Batch
from pf2lora.engines.stepper import no_mask_while_recording

DEVICE = torch.device("meta")


def attending(kind: str, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    model = tiny_model(kind, dtype=dtype)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"{kind} has no fused attention")
    model.set_attn_implementation(attention)
    return model


def there(batch: Batch) -> Batch:
    return replace(batch, tensors={name: tensor.to(DEVICE) for name, tensor in batch.tensors.items()})


def place() -> str:
    """The line of code that an operation is called from, ours or a library's."""
    torch_itself, here = str(Path(torch.__file__).parent), __file__
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith((torch_itself, here))]
    return f"`{frames[-1].line}` ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


class Crossings(TorchDispatchMode):
    """The operations that have tensors on both sides. A single number of the host's may be a factor: it is recorded
    with the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if len({t.device.type for t in tensors if t.dim() or "copy" in str(func)}) > 1:
            self.found.append(f"{func} at {place()}")
        return out


class FromNumbers(TorchFunctionMode):
    """Tensors on the device that are made of Python's numbers: a copy, too, which no operation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and out.device == DEVICE and out is not args[0]:
            self.found.append(f"{func.__name__} at {place()}")
        return out


@contextmanager
def as_recorded() -> Iterator[None]:
    """What transformers sees while a stream is recorded."""
    capturing = patch("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    with no_mask_while_recording(), capturing:
        yield


def obstacles(step: Callable[[], Any]) -> list[str]:
    """What would stand in the way of recording the step, after it has been tried aside once."""
    with as_recorded():
        step()
        with Crossings() as crossings, FromNumbers() as numbers:
            step()
    return crossings.found + numbers.found
