"""Tiny language models of every known kind with adapters far from zero, and clients' rows for them."""

from __future__ import annotations

import numpy as np
import torch
from language_models import configurations
from tokenizers_for_tests import byte_level
from torch import Tensor
from transformers import AutoModelForCausalLM

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation

VOCABULARY, CLIENTS = 4000, 3
CONFIGS = configurations(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    pad_token_id=1,
)
CONFIGS["gemma2"].final_logit_softcapping = 3.0
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
        AdapterSpec(rank=4, client_rank=2),
    )
    x = 0.3 * torch.randn(CLIENTS, found.common_layout.size, dtype=torch.float64)
    y = 0.3 * torch.randn(CLIENTS, found.personal_layout.size, dtype=torch.float64)
    return found, x.requires_grad_(), y.requires_grad_()


def whole() -> Batch:
    return ROWS.batch(CLIENTS, np.arange(ROWS.starts[-1]))


def loss_and_gradients(model: TwoLevelModel, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    loss = TASK.loss(model, x, y, batch)
    return loss.detach(), *torch.autograd.grad(loss.sum(), (x, y))
