"""A language model's loss where there is a target: its output layer sees these positions alone, some at a time.

Logits of all positions would be a step's largest tensor by far, and most of them are of prompts and padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, pad
from transformers import PreTrainedModel

from pf2lora.adapters.architectures import ARCHITECTURES
from pf2lora.adapters.layers import aligned
from pf2lora.core.second_order import is_differentiated_twice

MOST_LOGITS = 1 << 27  # at once: a gigabyte in bfloat16, with what the loss makes of them


@dataclass
class OutputLayer:
    """The frozen layer that makes logits of hidden states, and Gemma 2's bound on them."""

    weight: Tensor  # (vocabulary, d)
    bias: Tensor | None = None
    softcap: float | None = None
    filled: Tensor | None = None  # the weight with rows of zeros behind it, where fast products want eights
    compiled: Callable[..., Any] | None = None  # `loss_and_slope` in a few kernels

    def logits(self, hidden: Tensor) -> Tensor:
        """(positions, vocabulary), rounded as the model itself rounds them."""
        return self.bounded(linear(hidden, self.weight, self.bias))

    def bounded(self, raw: Tensor) -> Tensor:
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap

    def set_passes(self, *, compiled: bool) -> None:
        """Whether torch compiles what is made of the logits where a gradient is taken."""
        self.compiled = torch.compile(loss_and_slope, dynamic=False) if compiled else None

    def in_eights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for as many words as fast products want: GPT-2's 50,257 are odd."""
        place = self.weight.device, self.weight.dtype
        if self.filled is None or (self.filled.device, self.filled.dtype) != place:
            self.filled = aligned(self.weight.detach(), -2)
        missing = len(self.filled) - len(self.weight)
        return self.filled, self.bias if self.bias is None or not missing else pad(self.bias, (0, missing))


def output_layer(model: PreTrainedModel) -> OutputLayer | None:
    """The model's output layer, where it is known to be no more than this; None: only its own logits are right."""
    known = ARCHITECTURES.get(model.config.model_type)
    head = model.get_output_embeddings()
    if known is None or known.attention != "causal" or type(head) is not nn.Linear:
        return None
    return OutputLayer(head.weight, head.bias, getattr(model.config, "final_logit_softcapping", None))


def target_losses(
    layer: OutputLayer, hidden: Tensor, following: Tensor, counted: Tensor, most: int | None = None
) -> Tensor:
    """`−log p(following)` of every position `(rows, T)` of `hidden (rows, T, d)` where it is `counted`, else 0.

    `most` bounds how many positions are counted; it is known without asking the device, which a recorded step must not
    do. In the dtype of `counted`, which is 1 or 0.
    """
    states, wanted = hidden.flatten(0, 1), following.flatten()
    if most is None or most >= wanted.numel():
        return losses_of(layer, states, wanted, counted.dtype).view(counted.shape) * counted
    flags = counted.flatten()
    if flags.device.type == "cpu" and int(flags.sum()) > most:
        raise ValueError(
            f"{int(flags.sum())} positions have a target, and the batch was to have {most} at most"
        )
    # Those with a target first, in their order; what fills the places behind them counts nothing.
    at = flags.argsort(descending=True, stable=True)[:most]
    found = losses_of(layer, states.index_select(0, at), wanted.index_select(0, at), counted.dtype)
    return torch.zeros_like(flags).index_copy(0, at, found * flags.index_select(0, at)).view(counted.shape)


def losses_of(layer: OutputLayer, hidden: Tensor, wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """`−log p(wanted) (n,)` of the positions `hidden (n, d)`."""
    if is_differentiated_twice():
        return cross_entropy(layer.logits(hidden).to(dtype), wanted, reduction="none")
    losses: Tensor = ChunkedLosses.apply(hidden, wanted, layer, dtype)
    return losses


def loss_and_slope(
    raw: Tensor, wanted: Tensor, words: int, softcap: float | None, dtype: torch.dtype, sloped: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss `(n,)` of each position and, if it is wanted, its gradient by the `raw` logits `(n, words and what fills
    them up)`, which are written over. `softcap` is `OutputLayer.bounded`'s."""
    logits = raw if softcap is None else torch.tanh(raw / softcap) * softcap
    logits[:, words:] = -torch.inf  # what only fills up is nobody's next word
    logs = torch.log_softmax(logits, -1, dtype=dtype)
    right = logs.gather(1, wanted.unsqueeze(1))
    if not sloped:
        return -right.squeeze(1), None
    # p − 1 at the target in full precision: near p = 1, rounding p first would leave nothing of it.
    slope = logs.exp_().to(raw.dtype).scatter_(1, wanted.unsqueeze(1), right.expm1().to(raw.dtype))
    if softcap is not None:
        slope *= 1 - (logits / softcap).square()
        slope[:, words:] = 0
    return -right.squeeze(1), slope


class ChunkedLosses(torch.autograd.Function):
    """The losses with their gradients by the hidden states, both made chunk by chunk in the forward pass: no logits are
    kept. A loss has one number for each position, so its gradient is what comes back times the gradient made here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wanted: Tensor, layer: OutputLayer, dtype: torch.dtype) -> Tensor:
        losses = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        (weight, bias), words = layer.in_eights(), len(layer.weight)
        find = layer.compiled if layer.compiled and slopes is not None else loss_and_slope
        for chunk in chunks(len(hidden), len(weight)):
            raw = linear(hidden[chunk], weight, bias)
            losses[chunk], slope = find(raw, wanted[chunk], words, layer.softcap, dtype, slopes is not None)
            if slopes is not None and slope is not None:
                torch.mm(slope, weight, out=slopes[chunk])
        ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * weights.unsqueeze(1)).to(slopes.dtype), None, None, None


def chunks(positions: int, vocabulary: int) -> list[slice]:
    """About equal parts of the positions whose logits are made together, in eights as 16-bit products want them."""
    count = max(1, -(-positions * vocabulary // MOST_LOGITS))
    size = -(-positions // (8 * count)) * 8
    return [slice(start, start + size) for start in range(0, positions, size)]
