"""The layers that take M clients' adapters at once: a frozen projection with low-rank additions, and the head's.

A batch is M·b examples, client by client; a layer sees its input as (M, b·T, n) and multiplies it with stacked factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from pf2lora.adapters.in_place import adapted_linear
from pf2lora.adapters.quantised import QuantisedLinear
from pf2lora.adapters.spec import AdapterSpec
from pf2lora.core.randomness import keep_mask
from pf2lora.core.second_order import is_differentiated_twice

Projection = nn.Linear | Conv1D | QuantisedLinear
"""The linear layers that can be adapted."""


@dataclass(frozen=True)
class Part:
    """An adapted slice of a layer's output. A plain projection is one part; GPT-2's c_attn holds q, k and v."""

    name: str
    start: int
    stop: int


class Adapted(nn.Module):
    """A frozen linear layer plus the stacked adapters that `TwoLevelModel` binds for each pass."""

    def __init__(self, base: Projection, parts: Sequence[Part], spec: AdapterSpec, number: int) -> None:
        super().__init__()
        self.base = base
        self.parts = tuple(parts)
        self.spec = spec
        self.number = number  # tells the dropout masks of layers apart
        self.in_features, self.out_features = sizes(base)
        self.factors: tuple[Tensor, Tensor] | None = None  # (M, R, n) and (M, m, R) of all parts
        self.key: Tensor | None = None
        self.in_place = False  # on an accelerator, whether the addition is made where the product lies
        self.shares_input_with: list[
            Adapted
        ] = []  # the layer that gets the same input next (a list: it is no submodule)
        self.hands_over = True  # whether it computes what that layer needs of the input, too
        self.handed: tuple[Tensor, Tensor] | None = (
            None  # an input, and what the layer before made of it for us
        )

    def bind(self, factors: Mapping[str, tuple[Tensor, Tensor]], key: Tensor | None) -> None:
        """Take the adapters of M clients. The parts of a fused projection become one pair, block by block."""
        self.key = key
        self.in_place = not isinstance(self.base, QuantisedLinear) and not is_differentiated_twice()
        downs, ups = zip(*(factors[part.name] for part in self.parts))
        if len(self.parts) == 1:
            self.factors = downs[0], ups[0]
            return
        ranks = [down.shape[1] for down in downs]
        blocks = [
            pad(up, (sum(ranks[:i]), sum(ranks[i + 1 :]), part.start, self.out_features - part.stop))
            for i, (part, up) in enumerate(zip(self.parts, ups))
        ]
        self.factors = torch.cat(downs, dim=1), sum(blocks[1:], blocks[0])

    def unbind(self) -> None:
        self.factors = self.key = self.handed = None

    def forward(self, u: Tensor) -> Tensor:
        if self.factors is None:
            return self.base(u)
        clients = self.factors[0].shape[0]
        if u.shape[0] % clients:
            raise ValueError(f"a batch of {u.shape[0]} examples cannot be shared out among {clients} clients")
        up = self.factors[1]
        if self.in_place and u.is_cuda and torch.is_grad_enabled():
            weight = self.base.weight.mT if isinstance(self.base, Conv1D) else self.base.weight
            flat = adapted_linear(u.reshape(-1, self.in_features), weight, self.base.bias, self.narrow(u), up)
            return flat.view(*u.shape[:-1], self.out_features)
        out = self.base(u)
        return torch.baddbmm(out.view(clients, -1, self.out_features), self.narrow(u), up.mT).view(out.shape)

    def narrow(self, u: Tensor) -> Tensor:
        """`u [A; C]ᵀ (M, rows, R)`: computed here, or already by the layer before, which has the same input."""
        assert self.factors is not None
        if self.handed is not None and self.handed[0] is u:
            inner, self.handed = self.handed[1], None
            return inner
        clients, rank = self.factors[0].shape[:2]
        grouped = u.reshape(clients, -1, self.in_features)
        if self.key is not None and self.spec.dropout:
            mask = keep_mask(self.key, self.number, u.shape, self.spec.dropout)
            grouped = grouped * mask.view_as(grouped).to(u.dtype) / (1 - self.spec.dropout)
        if not (self.shares_input_with and self.hands_over) or self.shares_input_with[0].factors is None:
            return grouped @ self.factors[0].mT
        both = grouped @ torch.cat([self.factors[0], self.shares_input_with[0].factors[0]], dim=1).mT
        self.shares_input_with[0].handed = u, both[..., rank:]
        return both[..., :rank]

    def per_client(self, u: Tensor) -> Tensor:
        """The layer's output for one input `(1, T, n)` that all clients share: `(M, T, m)`."""
        out = self.base(u)
        if self.factors is None:
            return out
        down, up = self.factors
        return torch.baddbmm(out.expand(len(down), -1, -1), u.expand(len(down), -1, -1) @ down.mT, up.mT)


class ClientLinear(nn.Module):
    """A trainable linear layer of the head: its own weights for every client."""

    def __init__(self, base: nn.Linear, name: str) -> None:
        super().__init__()
        self.base, self.name = base, name
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def bind(self, common: dict[str, Tensor]) -> None:
        self.weight, self.bias = common[f"{self.name}.weight"], common.get(f"{self.name}.bias")

    def unbind(self) -> None:
        self.weight = self.bias = None

    def forward(self, u: Tensor) -> Tensor:
        if self.weight is None:
            return self.base(u)
        # The head is small and its logits decide: it runs in its own precision, not in the base model's.
        grouped = u.reshape(self.weight.shape[0], -1, u.shape[-1]).to(self.weight.dtype)
        out = grouped @ self.weight.mT
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        return out.view(*u.shape[:-1], out.shape[-1])


def aligned(block: Tensor, dim: int) -> Tensor:
    """The rank filled up with zeros to a multiple of 8 on a CUDA device in 16 bits, whose fast products need that."""
    missing = -block.shape[dim] % 8
    if not missing or block.device.type != "cuda" or block.element_size() != 2:
        return block
    return pad(block, (0, missing) if dim == -1 else (0, 0, 0, missing))


def sizes(layer: Projection) -> tuple[int, int]:
    """The input and output size of a linear layer; GPT-2's Conv1D keeps its weight transposed."""
    if not isinstance(layer, Conv1D):
        return layer.in_features, layer.out_features
    rows, columns = layer.weight.shape
    return rows, columns


def is_transposed(layer: Projection) -> bool:
    """Whether the checkpoint has its weight as `(in, out)`."""
    return layer.transposed if isinstance(layer, QuantisedLinear) else isinstance(layer, Conv1D)


def precision(layer: Projection) -> torch.dtype:
    """What it computes in."""
    return layer.dtype if isinstance(layer, QuantisedLinear) else layer.weight.dtype
