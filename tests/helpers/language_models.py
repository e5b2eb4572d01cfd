"""Tiny random language models of every architecture that the README names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pf2lora.adapters.architectures import ARCHITECTURES
from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel

VOCABULARY, POSITIONS = 400, 96


def configurations(**sizes: Any) -> dict[str, PretrainedConfig]:
    """One of each kind, in these sizes; key and value have half as many heads as the query where they can."""
    heads = sizes["num_attention_heads"]
    sizes["head_dim"] = sizes["hidden_size"] // heads
    grouped = {"num_key_value_heads": heads // 2}
    causal = [kind for kind, known in ARCHITECTURES.items() if known.attention == "causal"]
    return {
        kind: AutoConfig.for_model(kind, **sizes | ({} if kind == "gpt2" else grouped)) for kind in causal
    }


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LANGUAGE_MODELS = configurations(**SMALL)
IN_FLOAT32 = set(LANGUAGE_MODELS) - {"gpt2", "phi"}
"""Those whose norms and rotations are made in float32, whatever the model's precision is."""


def language_model(
    kind: str, dtype: torch.dtype = torch.float64, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Weights that are large enough for its outputs to depend on everything."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config or LANGUAGE_MODELS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.to(dtype).eval()


def adapted_model(
    kind: str, clients: int, dtype: torch.dtype = torch.float64, **spec: Any
) -> tuple[TwoLevelModel, Tensor, Tensor]:
    """A model and adapters that are different, and far from zero, for every client."""
    given: dict[str, Any] = {"rank": 4, "client_rank": 2}
    model = TwoLevelModel(language_model(kind, dtype), AdapterSpec(**given | spec))
    torch.manual_seed(1)
    x = 0.3 * torch.randn(clients, model.common_layout.size, dtype=torch.float64)
    y = 0.3 * torch.randn(clients, model.personal_layout.size, dtype=torch.float64)
    return model, x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()
