"""What crosses the network: one flat safetensors buffer per message, the declared fields in its header.

A message is the named tensors of the common adapter (none, in messages without it) and a small JSON object. The
format has room for nothing else: safetensors refuses buffers with gaps or with bytes after the last tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pf2lora.core.layout import Entry, Layout
from pf2lora.errors import UserError

FIELDS = "pf2lora"  # the header's only metadata key
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Malformed(ValueError):
    """Bytes that are no message, or not the message that was agreed on."""


class Message(NamedTuple):
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def encode(fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """A message as bytes."""
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return save(dict(tensors or {}), metadata={FIELDS: text})


def decode(data: bytes) -> Message:
    """The message in `data`; anything that is not exactly a message raises `Malformed`."""
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__")
        if not isinstance(metadata, dict) or set(metadata) != {FIELDS}:
            raise Malformed(f"its header holds {sorted(metadata or {})} instead of {FIELDS!r} alone")
        fields = json.loads(metadata[FIELDS])
        tensors = load(data)
    except (SafetensorError, ValueError, AttributeError, KeyError, TypeError, OverflowError) as error:
        raise Malformed(str(error).splitlines()[0] if str(error) else "it is no safetensors buffer") from None
    if not isinstance(fields, dict):
        raise Malformed("its fields are no object")
    return Message(fields, tensors)


def truncated(entry: Entry, rank: int | None) -> tuple[int, ...]:
    """The shape of an entry's first `rank` rows (A) or columns (B); None is all of them."""
    if rank is None or entry.kind == "head":
        return entry.shape
    rows, columns = entry.shape
    return (min(rank, rows), columns) if entry.kind == "A" else (rows, min(rank, columns))


def to_tensors(layout: Layout, common: Tensor, rank: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The shared numbers `common (shared,)` as named tensors, truncated to `rank` (HETLoRA's r_k)."""
    sizes = [entry.size for entry in layout.shared_entries]
    pieces = torch.split(common.detach().cpu(), sizes) if sizes else ()
    return {
        entry.name: cut(piece.view(entry.shape), truncated(entry, rank)).to(dtype).contiguous()
        for entry, piece in zip(layout.shared_entries, pieces)
    }


def cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(size) for size in shape)]


def to_flat(layout: Layout, tensors: Mapping[str, Tensor]) -> Tensor:
    """Named tensors as `(shared,)`; what was truncated is zero again."""
    flat = torch.zeros(layout.shared)
    for entry in layout.shared_entries:
        if entry.name not in tensors:
            continue
        start, sent = layout.offsets[entry.name], tensors[entry.name]
        whole = flat[start : start + entry.size].view(entry.shape)
        whole[tuple(slice(size) for size in sent.shape)] = sent.float()
    return flat


def rank_of(layout: Layout, tensors: Mapping[str, Tensor]) -> int | None:
    """The rank that `tensors` were truncated to; None where nothing was cut off."""
    for entry in layout.shared_entries:
        if entry.kind == "A" and entry.name in tensors:
            rank = tensors[entry.name].shape[0]
            return rank if rank < entry.shape[0] else None
    return None


def check_tensors(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Exactly the shared entries, in their shapes (all truncated to one rank) and in `dtype`."""
    expected = {entry.name: entry for entry in layout.shared_entries}
    for name in tensors:
        if name not in expected:
            raise Malformed(f"the tensor {name!r} is not part of the common adapter")
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise Malformed(f"the tensor {missing[0]!r} is missing")
    rank = rank_of(layout, tensors)
    for name, entry in expected.items():
        found, shape = tensors[name], truncated(entry, rank)
        if tuple(found.shape) != shape:
            raise Malformed(f"the tensor {name!r} has shape {tuple(found.shape)}, not {shape}")
        if found.dtype != dtype:
            raise Malformed(f"the tensor {name!r} is {found.dtype}, not {dtype}")


def describe(layout: Layout) -> list[list[Any]]:
    """The shared entries, for a server that has no base model to derive them from."""
    return [[e.module, e.kind, list(e.shape), e.parameter] for e in layout.shared_entries]


def layout_from(entries: list[list[Any]]) -> Layout:
    """The layout of `describe`'s entries: all of it is shared."""
    try:
        found = tuple(
            Entry(module, kind, tuple(shape), parameter) for module, kind, shape, parameter in entries
        )
        return Layout(found, sum(entry.size for entry in found))
    except (TypeError, ValueError) as error:
        raise Malformed(f"the description of the common adapter cannot be read: {error}") from None


def dtype_named(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"wire is {name!r}; x travels as {' or '.join(DTYPES)}")
    return DTYPES[name]
