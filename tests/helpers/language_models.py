"""Tiny random language models of every architecture that the README names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel

VOCABULARY, POSITIONS = 400, 96
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
GROUPED = SMALL | {"num_key_value_heads": 2}
LANGUAGE_MODELS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS),
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral": MistralConfig(**GROUPED),
    "smollm3": SmolLM3Config(**GROUPED),
    "gemma": GemmaConfig(**GROUPED, head_dim=8),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8),
    "gemma3_text": Gemma3TextConfig(**GROUPED, head_dim=8),
    "olmo2": Olmo2Config(**GROUPED),
    "phi": PhiConfig(**SMALL),
    "phi3": Phi3Config(**GROUPED),
}
IN_FLOAT32 = set(LANGUAGE_MODELS) - {"gpt2", "phi"}
"""Those whose norms and rotations are made in float32, whatever the model's precision is."""


def language_model(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Weights that are large enough for its outputs to depend on everything."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(LANGUAGE_MODELS[kind]))
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
