"""What crosses the network: one flat safetensors buffer per message, the declared fields in its header.

A message is the named tensors of the common adapter (none, in messages without it) and a small JSON object. The
format has room for nothing else: buffers with gaps, with bytes after the last tensor, or with a JSON key that stands
twice are refused. What is read of a message are views of its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.layout import Entry, Layout
from pf2lora.federation.protocol.buffers import METADATA, pieces, views
from pf2lora.parsing import parse_json, refuse

FIELDS = "pf2lora"  # the header's only metadata key
LARGEST = 2**32  # numbers in a common adapter
LONGEST_HEADER = (
    1 << 24
)  # bytes: a site's description of an adapter of a hundred thousand tensors is that long
LONGEST = 200  # characters of a tensor's name, or of an error that quotes foreign bytes


class Malformed(ValueError):
    """Bytes that are no message, or not the message that was agreed on. One printable line."""


class Message(NamedTuple):
    """A decoded message. `kind` and `round` are there once the message was checked (`allow_list`)."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def kind(self) -> str:
        """What it is: hello, train, update, …"""
        return str(self.fields["kind"])

    @property
    def round(self) -> int:
        """The round it belongs to, from 1."""
        return int(self.fields["round"])


def encode(fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """A message as bytes."""
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return b"".join(pieces(tensors or {}, {FIELDS: text}))


def decode(data: object) -> Message:
    """The message in `data`; whatever is not exactly a message raises `Malformed`, and nothing else."""
    if not isinstance(data, bytes):
        raise Malformed(f"a message is bytes, not {type(data).__name__}")
    try:
        length = int.from_bytes(data[:8], "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"its header has {length} bytes, of which there are {LONGEST_HEADER} at most")
        header = strict_json(data[8 : 8 + length])
        metadata = header[METADATA]
        fields = strict_json(metadata[FIELDS])
        tensors = views(data, 8 + length, header)
    except Exception as error:  # the bytes are foreign: whatever a parser raises, they are no message
        raise Malformed(f"no message of pf2lora: {one_line(error)}") from None
    if set(metadata) != {FIELDS}:
        raise Malformed(f"its header holds {short(sorted(metadata))} instead of {FIELDS!r} alone")
    if not isinstance(fields, dict):
        raise Malformed("its fields are no object")
    return Message(fields, tensors)


def strict_json(text: str | bytes) -> Any:
    """JSON without keys that stand twice (the first would leave unseen) and without NaN and infinities."""

    return parse_json(text, refuse)


def one_line(error: Exception) -> str:
    """The first line of an error that may quote foreign bytes: short and printable."""
    line = (str(error).splitlines() or [""])[0][:LONGEST]
    return "".join(c if c.isprintable() else "?" for c in line) or type(error).__name__


def to_tensors(layout: Layout, common: Tensor, rank: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The numbers `common (n,)`, laid out as `layout`, as named tensors, truncated to `rank` (HETLoRA's r_k)."""
    pieces = torch.split(common.detach().cpu(), layout.sizes) if layout.sizes else ()
    return {
        entry.name: cut(piece.view(entry.shape), entry.truncated(rank)).to(dtype).contiguous()
        for entry, piece in zip(layout.entries, pieces)
    }


def cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first rows and columns of a tensor, as a view of shape `shape`."""
    return tensor[tuple(slice(size) for size in shape)]


def to_flat(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Named tensors as `(n,)`, laid out as `layout`; what was truncated is zero again."""
    flat = torch.zeros(layout.size, dtype=dtype)
    for entry in layout.entries:
        if entry.name not in tensors:
            continue
        start, sent = layout.offsets[entry.name], tensors[entry.name]
        whole = flat[start : start + entry.size].view(entry.shape)
        cut(whole, tuple(sent.shape))[...] = sent.to(dtype)
    return flat


def rank_of(layout: Layout, tensors: Mapping[str, Tensor]) -> int | None:
    """The rank that `tensors` were truncated to; None where nothing was cut off."""
    for entry in layout.entries:
        if entry.kind in ("A", "B") and entry.name in tensors and tensors[entry.name].dim() == 2:
            axis = 0 if entry.kind == "A" else 1
            rank = tensors[entry.name].shape[axis]
            return rank if rank < entry.shape[axis] else None
    return None


def check_tensors(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    *,
    truncated: bool = True,
) -> None:
    """`Malformed` unless these are exactly the entries of `layout`, in their shapes and `dtypes`; all of them may be
    `truncated` to one rank where the method does that."""
    expected = layout.by_name
    for name in tensors:
        if name not in expected:
            raise Malformed(f"the tensor {short_name(name)} is not part of the common adapter")
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise Malformed(f"the tensor {missing[0]!r} is missing")
    rank = rank_of(layout, tensors) if truncated else None
    if rank == 0:
        raise Malformed("the common adapter is truncated to nothing")
    for name, entry in expected.items():
        found, shape = tensors[name], entry.truncated(rank)
        if tuple(found.shape) != shape:
            raise Malformed(f"the tensor {name!r} has shape {tuple(found.shape)}, not {shape}")
        if found.dtype != dtypes[name]:
            raise Malformed(f"the tensor {name!r} is {found.dtype}, not {dtypes[name]}")


def short_name(name: str) -> str:
    """A foreign tensor's name, quoted and cut."""
    return repr(name if len(name) <= LONGEST else name[:LONGEST] + "…")


def describe(layout: Layout) -> list[list[Any]]:
    """The shared entries as JSON, for a server that has no base model to derive them from."""
    return [[e.module, e.kind, list(e.shape), e.parameter] for e in layout.shared_entries]


def layout_from(entries: Any) -> Layout:
    """The layout of `describe`'s entries: all of it is shared. `Malformed` if no model could have such a one."""
    if not isinstance(entries, list):
        raise Malformed("the description of the common adapter is no list")
    found = tuple(entry_from(entry) for entry in entries)
    layout = Layout(found, sum(entry.size for entry in found))
    if len(layout.by_name) < len(found):
        raise Malformed("the description of the common adapter names a tensor twice")
    if layout.size > LARGEST:
        raise Malformed(f"the description of the common adapter has more than {LARGEST} numbers")
    factors = {kind: {e.module: e for e in found if e.kind == kind} for kind in ("A", "B")}
    for module in factors["A"].keys() | factors["B"].keys():
        down, up = factors["A"].get(module), factors["B"].get(module)
        if down is None or up is None or down.shape[0] != up.shape[1]:
            raise Malformed(f"the description of the common adapter: A and B of {module!r} do not fit")
    return layout


def entry_from(described: Any) -> Entry:
    """One entry of `describe`, checked."""
    match described:
        case [str(module), ("A" | "B" | "head") as kind, [_, *_] as shape, str(parameter)]:
            sizes_fit = all(type(n) is int and 0 < n <= LARGEST for n in shape)
            dimensions_fit = len(shape) <= 4 if kind == "head" else len(shape) == 2
            if sizes_fit and dimensions_fit and len(module) + len(parameter) <= LONGEST:
                return Entry(module, kind, tuple(shape), parameter)
    raise Malformed(f"the description of the common adapter has an impossible entry {short(described)}")
