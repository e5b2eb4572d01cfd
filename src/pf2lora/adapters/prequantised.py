"""Checkpoints that are already in 4 or 8 bits: those of bitsandbytes load, and their layers become ours of the same
numbers; of others a line says what would do instead."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pf2lora.adapters.quantised import QuantisedLinear
from pf2lora.errors import UserError, missing_extra

MARKS = ("quantization_method", "hf_quantizer", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")


def quantised_by(config: Any) -> str | None:
    """What made the checkpoint's small numbers, by its configuration; None: it has ordinary ones."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def check_quantised(name: str, config: Any) -> None:
    """Before it is loaded: whether it can be."""
    method = quantised_by(config)
    if method is None:
        return
    if method != "bitsandbytes":
        raise UserError(
            f"the model {name!r} is quantised by {method!r}, and only bitsandbytes' can be trained on: give the "
            f"original model, with --quantization nf4 or int8"
        )
    for package in ("bitsandbytes", "accelerate"):
        if find_spec(package) is None:
            raise missing_extra(package, "quantised", f"the model {name!r}, which bitsandbytes quantised,")


def converted(name: str, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put our layers in the place of bitsandbytes', whose own forget gradients after an evaluation on some processors,
    and make it a model that may be moved as others are."""
    for place, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind in ("Linear4bit", "Linear8bitLt"):
            make = from_4bit if kind == "Linear4bit" else from_8bit
            model.set_submodule(place, make(f"the model {name!r} at {place!r}", module, dtype))
    for mark in MARKS:
        model.__dict__.pop(mark, None)
    del model.config.quantization_config


def from_4bit(where: str, layer: Any, dtype: torch.dtype) -> QuantisedLinear:
    """The same codes; scales that were themselves rounded are made numbers."""
    state = layer.weight.quant_state
    if state.quant_type != "nf4":
        raise UserError(f"{where} has numbers of type {state.quant_type!r}; only nf4 and int8 are known")
    scales = state.absmax
    if state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes = layer.weight.data.view(torch.uint8).flatten()
    return placed(
        layer, QuantisedLinear(codes, scales.float(), tuple(state.shape), dtype, bias_of(layer, dtype))
    )


def from_8bit(where: str, layer: Any, dtype: torch.dtype) -> QuantisedLinear:
    weight = layer.weight
    scales = (weight.SCB if weight.SCB is not None else layer.state.SCB).float().unsqueeze(1) / 127
    codes = weight.CB if weight.CB is not None else weight.data
    return placed(layer, QuantisedLinear(codes, scales, tuple(codes.shape), dtype, bias_of(layer, dtype)))


def bias_of(layer: nn.Linear, dtype: torch.dtype) -> torch.Tensor | None:
    return None if layer.bias is None else layer.bias.detach().to(dtype)


def placed(layer: Any, made: QuantisedLinear) -> QuantisedLinear:
    made.transposed = getattr(layer, "source_cls", nn.Linear) is Conv1D
    return made
