"""Tiny language models of every known kind with adapters far from zero, and clients' rows for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers_for_tests import byte_level
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
)

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation

VOCABULARY, CLIENTS = 4000, 3
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 1}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "mistral": MistralConfig(**GROUPED),
    "gemma": GemmaConfig(**GROUPED, head_dim=8),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=3.0),
    "phi": PhiConfig(**SMALL),  # its output layer has a bias
}
TEXTS = ["The pizza place is near the river.", "Noodles and tapas, of an evening."]
TASK = Generation(byte_level(TEXTS * 20), GenerationSettings(max_length=64, max_new_tokens=0))
ROWS = TASK.encode(
    [
        [PromptRow(text[: 3 + 5 * k], (text[k : 20 + 3 * k], "Yes.")) for text in TEXTS]
        for k in range(CLIENTS)
    ],
    training=True,
)


def two_level(kind: str) -> tuple[TwoLevelModel, Tensor, Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    found = TwoLevelModel(
        model.double(),
        AdapterSpec(rank=4, client_rank=2, targets=("q_proj", "v_proj") if kind == "phi" else ()),
    )
    x = 0.3 * torch.randn(CLIENTS, found.common_layout.size, dtype=torch.float64)
    y = 0.3 * torch.randn(CLIENTS, found.personal_layout.size, dtype=torch.float64)
    return found, x.requires_grad_(), y.requires_grad_()


def whole() -> Batch:
    return ROWS.batch(CLIENTS, np.arange(ROWS.starts[-1]))


def loss_and_gradients(model: TwoLevelModel, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    loss = TASK.loss(model, x, y, batch)
    return loss.detach(), *torch.autograd.grad(loss.sum(), (x, y))
