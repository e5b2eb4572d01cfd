"""A frozen base model in 4 or 8 bits: its layers' projections are held as small integers, and are made numbers again
for one product at a time.

NF4 is QLoRA's (Dettmers et al., 2023): blocks of 64 weights, each divided by its largest and rounded to the nearest of
16 quantiles of a normal distribution, packed as bitsandbytes packs them. int8 rounds each output's weights to 255
steps. Plain PyTorch, so that such layers are recorded, compiled and run on any device as others are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from pf2lora.core.second_order import is_differentiated_twice

KINDS = ("nf4", "int8")
BLOCK = 64
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


class QuantisedLinear(nn.Module):
    """A frozen linear layer; `transposed` as GPT-2's Conv1D keeps its weight."""

    codes: Tensor  # nf4: (numbers / 2,) two in each byte; int8: (out, in)
    scales: Tensor  # nf4: (blocks,); int8: (out, 1)
    bias: Tensor | None
    pairs: Tensor  # nf4: (256, 2) what a byte stands for

    def __init__(
        self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.dtype, self.transposed = dtype, False
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        nibbles = torch.tensor(NF4, device=codes.device)
        self.register_buffer("pairs", torch.cartesian_prod(nibbles, nibbles), persistent=False)

    @classmethod
    def of(cls, layer: nn.Linear | Conv1D, kind: str, device: torch.device | str) -> QuantisedLinear:
        """The layer's weights on `device`, rounded there."""
        transposed = isinstance(layer, Conv1D)
        weight = layer.weight.detach().to(device)
        weight = weight.T.contiguous() if transposed else weight
        codes, scales = (nf4 if kind == "nf4" else int8)(weight)
        bias = None if layer.bias is None else layer.bias.detach().to(device)
        made = cls(codes, scales, (weight.shape[0], weight.shape[1]), weight.dtype, bias)
        made.transposed = transposed
        return made

    def plain(self) -> nn.Linear | Conv1D:
        """An ordinary layer of the same numbers, as the checkpoint has it."""
        weight, place = self.numbers(), {"device": "meta", "dtype": self.dtype}
        layer: nn.Linear | Conv1D
        if self.transposed:
            layer, weight = Conv1D(self.out_features, self.in_features), weight.T.contiguous()
        else:
            layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, **place)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.clone(), requires_grad=False)
        return layer

    def numbers(self) -> Tensor:
        """The weights `(out, in)` that the codes stand for."""
        if self.codes.dtype == torch.int8:
            return (self.codes * self.scales).to(self.dtype)
        blocks = self.pairs[self.codes.int()].view(len(self.scales), -1) * self.scales.unsqueeze(1)
        size = self.out_features * self.in_features
        return blocks.to(self.dtype).view(-1)[:size].view(self.out_features, self.in_features)

    def forward(self, u: Tensor) -> Tensor:
        if (
            torch.compiler.is_compiling() or is_differentiated_twice()
        ):  # a compiler sees what is cheaper made again
            return linear(u, self.numbers(), self.bias)
        product: Tensor = FrozenProduct.apply(u, self)
        return product if self.bias is None else product + self.bias


class FrozenProduct(torch.autograd.Function):
    """`u Wᵀ` without keeping W: its numbers are made once more for the gradient."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return linear(u, layer.numbers())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.numbers(), None


def nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two 4-bit numbers in each byte, the first of them in its upper half, and each block's largest magnitude."""
    flat = weight.float().flatten()
    blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    quantiles = torch.tensor(NF4, device=weight.device)
    between = (quantiles[1:] + quantiles[:-1]) / 2
    nearest = (
        torch.bucketize(blocks / scales.clamp_min(1e-30).unsqueeze(1), between).to(torch.uint8).view(-1, 2)
    )
    return nearest[:, 0] << 4 | nearest[:, 1], scales


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each output's weights in 255 steps from its largest magnitude to the opposite."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales.clamp_min(1e-30)).round().to(torch.int8), scales


def quantise(model: nn.Module, kind: str, device: torch.device | str) -> None:
    """Put the projections of the model's layers (what lies in a list of modules) on `device` in 4 or 8 bits.
    Embeddings, norms and the head stay as they are, where they are."""
    lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, Conv1D)) and name.startswith(tuple(lists)):
            model.set_submodule(name, QuantisedLinear.of(module, kind, device))


def dequantise(model: nn.Module) -> None:
    """Give the model ordinary layers again, of the numbers that the codes stand for."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantisedLinear):
            model.set_submodule(name, module.plain())


def held_bytes(model: nn.Module) -> int:
    """How many bytes the model's numbers take."""
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(held.values())
