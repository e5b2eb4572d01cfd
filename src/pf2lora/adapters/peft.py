"""Adapters out: standard PEFT folders, and merged models.

A client's `s·BA + s̃·D_kC_k` is one LoRA of rank r + r̃: `A' = [A; C]`, `B' = [sB, s̃D]`, `lora_alpha = r + r̃`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from pf2lora.adapters.base_model import fresh_parameters
from pf2lora.adapters.layers import Adapted, is_transposed
from pf2lora.adapters.quantised import dequantise
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.atomic import make_folder, write_bytes, write_json, writing
from pf2lora.core.factors import down, up
from pf2lora.core.layout import Layout
from pf2lora.errors import CannotWrite

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_CONFIG = (
    "config.json"  # of the base model with the task's head: how many labels there are, and their names
)


def combined(layer: Adapted, common: dict[str, Tensor], personal: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A layer's whole adapter as one pair `(R, n)` and `(m, R)`, of one client's tensors.

    A fused projection's parts keep their own A, so theirs stand below each other and B' is block-wise.
    """
    downs, ups = [], []
    for part in layer.parts:
        C, D = personal.get(f"{part.name}.C"), personal.get(f"{part.name}.D")
        of_part = up(common[f"{part.name}.B"], D, layer.spec.scaling, layer.spec.client_scaling)
        rows = of_part.new_zeros(layer.out_features, of_part.shape[1])
        rows[part.start : part.stop] = of_part
        downs.append(down(common[f"{part.name}.A"], C))
        ups.append(rows)
    return torch.cat(downs), torch.cat(ups, dim=1)


def one_client(
    model: TwoLevelModel, common: Tensor, personal: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One client's named tensors from its flat vectors `(P,)` and `(Q,)`; a personal adapter of zeros is none."""

    def named(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
        return {name: t[0] for name, t in layout.unpack(flat.detach().float().cpu()[None]).items()}

    own = named(model.personal_layout, personal) if personal.any() else {}
    whole = named(model.common_layout, common)
    return {name: t + own[name] if name in own else t for name, t in whole.items()}, own


def kept_whole(model: TwoLevelModel) -> list[str]:
    """The modules that go out as they are: the head, and whatever else the checkpoint does not hold (a pooler)."""
    roots = list(model.head_roots)
    for name in sorted(fresh_parameters(model.model)):
        module = name.rpartition(".")[0]
        if not any(f"{module}.".startswith(f"{root}.") for root in roots):
            roots.append(module)
    return roots


def whole_tensors(model: TwoLevelModel, common: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their parameters: the trained ones, or the model's where they are frozen."""
    state = {}
    for root in kept_whole(model):
        for name, parameter in model.model.get_submodule(root).state_dict(prefix=f"{root}.").items():
            plain = name.replace(".base.", ".")
            state[plain] = common.get(plain, parameter)
    return state


def save_peft(
    folder: Path,
    model: TwoLevelModel,
    common: Tensor,
    personal: Tensor,
    peft_type: str | None,
    base_model: str,
) -> None:
    """One client's adapter and head as a folder that plain `PeftModel.from_pretrained(base, folder)` loads.

    The base model's configuration lies beside it, so that `base` can be made with the head's labels by their names.
    `peft_type` is what PEFT calls the task (`Task.peft_type`).
    """
    shared, own = one_client(model, common, personal)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, layer in model.adapted.items():
        A, B = combined(layer, shared, own)
        tensors[f"base_model.model.{name}.lora_A.weight"] = A
        tensors[f"base_model.model.{name}.lora_B.weight"] = B
        ranks[name] = A.shape[0]
    tensors |= {f"base_model.model.{name}": t for name, t in whole_tensors(model, shared).items()}
    make_folder(folder)
    contiguous = {name: t.detach().float().cpu().contiguous().clone() for name, t in tensors.items()}
    write_bytes(folder / WEIGHTS, save(contiguous, metadata={"format": "pt"}))
    config = peft_config(model, ranks, peft_type, base_model)
    write_json(folder / ADAPTER_CONFIG, config)
    write_json(folder / BASE_CONFIG, json.loads(model.model.config.to_json_string()))


def peft_config(
    model: TwoLevelModel, ranks: dict[str, int], peft_type: str | None, base_model: str
) -> dict[str, Any]:
    """adapter_config.json. The scaling is inside B', so lora_alpha equals the rank."""
    rank = max(ranks.values())
    smaller = {name: r for name, r in ranks.items() if r != rank}  # beside GPT-2's fused projections
    conv = any(is_transposed(layer.base) for layer in model.adapted.values())
    return {
        "peft_type": "LORA",
        "task_type": peft_type,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "modules_to_save": kept_whole(model) or None,
        "fan_in_fan_out": conv,
        "inference_mode": True,
    }


@torch.no_grad()
def merged_state(model: TwoLevelModel, common: Tensor, personal: Tensor) -> dict[str, Tensor]:
    """The base model's own parameters with one client's adapter added and its head put in. A quantised base, which
    the adapter was trained on as it is rounded, becomes an ordinary one of the same numbers."""
    dequantise(model.model)
    shared, own = one_client(model, common, personal)
    state = {name.replace(".base.", "."): t.clone() for name, t in model.model.state_dict().items()}
    for name, layer in model.adapted.items():
        A, B = combined(layer, shared, own)
        delta = B @ A
        weight = state[f"{name}.weight"]
        wide = weight.float().cpu() + (delta.T if is_transposed(layer.base) else delta)
        state[f"{name}.weight"] = wide.to(weight.dtype)
    return state | whole_tensors(model, shared)


def save_merged(folder: Path, model: TwoLevelModel, common: Tensor, personal: Tensor, tokenizer: Any) -> None:
    """A merged model that needs neither PEFT nor pf2lora. The model in hand becomes the merged one."""
    state = merged_state(model, common, personal)
    model.remove()
    model.model.load_state_dict(state)
    with writing(folder):
        try:
            model.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except SafetensorError as error:  # a full disk is one too
            raise CannotWrite(folder, error) from None
