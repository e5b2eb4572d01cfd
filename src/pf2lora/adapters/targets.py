"""Which layers of a model are adapted, and which parts of a projection that holds several side by side."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pf2lora.adapters.architectures import HEADS, Architecture
from pf2lora.adapters.layers import Part, Projection, sizes
from pf2lora.adapters.spec import ALL_LINEAR
from pf2lora.errors import UserError


def split_parts(name: str, base: Projection, architecture: Architecture, config: Any) -> list[Part]:
    """The adapted parts of a layer: all of it, or of a fused projection those that the architecture adapts. Key and
    value may have fewer heads than the query."""
    out = sizes(base)[1]
    if not (architecture.fused and any(name.endswith(t) for t in architecture.targets)):
        return [Part(name, 0, out)]
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = out // (heads + 2 * shared)  # of a head
    widths = {"q": width * heads, "k": width * shared, "v": width * shared}
    parts, start = [], 0
    for part in architecture.fused:
        if part in architecture.adapted_parts:
            parts.append(Part(f"{name}.{part}", start, start + widths[part]))
        start += widths[part]
    return parts


def find_targets(model: nn.Module, wanted: Sequence[str], architecture: Architecture) -> list[str]:
    """The linear layers that `wanted` names, by name, ending or pattern; for "all-linear" all but the head's and the
    output layer; the architecture's default without."""
    head = HEADS + architecture.extra_head
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Projection) and name.split(".")[0] not in head
    ]
    if tuple(wanted) == (ALL_LINEAR,):
        written = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        return [name for name in linear if model.get_submodule(name) is not written]
    patterns = list(wanted) or list(architecture.targets)
    found = [n for n in linear if any(matches(n, p) for p in patterns)]
    unmatched = [p for p in patterns if not any(matches(n, p) for n in linear)]
    if unmatched or not found:
        candidates = sorted({n.split(".")[-1] for n in linear})
        what = (
            f"no layer matches the target {unmatched[0]!r}" if unmatched else "no default targets are known"
        )
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UserError(
            f"{what} in this model ({kind}); linear layers to choose from: {', '.join(candidates)}"
        )
    return found


def matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatch.fnmatchcase(name, pattern)
