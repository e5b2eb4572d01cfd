"""Tensors in the safetensors format without copies: its pieces to write, and views into the bytes that arrived.

`safetensors` itself copies what it reads, and holds twice what it writes to memory. Of a large x that is most of what a
server needs.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_AXES = 8

# Views of bytes must not be written to, which nobody does who reads a message.
warnings.filterwarnings("ignore", "The given buffer is not writable")


def pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """What the bytes of a safetensors file are made of, one after the other: its header and the tensors' own memory.
    The largest numbers come first, so that all of them are aligned."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    found, at = list[bytes | memoryview](), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        numbers = tensor.detach().cpu().contiguous()
        end = at + numbers.nbytes
        header[name] = {
            "dtype": NAMES[numbers.dtype],
            "shape": list(numbers.shape),
            "data_offsets": [at, end],
        }
        found.append(numbers.flatten().view(torch.uint8).numpy().data)
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *found]


def views(data: bytes, start: int, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a `header`, whose numbers are in `data` from `start` on, without a gap and to the end; else some
    exception."""
    found, at = dict[str, Tensor](), start
    named = [(name, about) for name, about in header.items() if name != METADATA]
    for name, about in sorted(named, key=lambda item: item[1]["data_offsets"]):
        if set(about) != {"dtype", "shape", "data_offsets"}:
            raise ValueError("a tensor is not described by its dtype, shape and place")
        dtype, shape, place = DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
        if len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in (*shape, *place)):
            raise ValueError("a tensor has an impossible shape or place")
        count = math.prod(shape)
        if place != [at - start, at - start + count * dtype.itemsize] or at % dtype.itemsize:
            raise ValueError("a tensor is not where the one before it ends, or not of its length")
        if count:
            found[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=at).view(shape)
        else:
            found[name] = torch.empty(shape, dtype=dtype)
        at += count * dtype.itemsize
    if at != len(data):
        raise ValueError("it does not end with its last tensor")
    return found
