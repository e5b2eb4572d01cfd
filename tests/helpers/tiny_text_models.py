"""Tiny random models that read and write, for the tasks of question answering and generation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers_for_tests import word_piece
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    BertConfig,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

POSITIONS, VOCABULARY = 96, 400
CAUSAL: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS),
    "llama": LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
    ),
}
WORDS = [
    f"{a}{b}"
    for a in ("stone", "river", "cloud", "wood", "salt", "iron")
    for b in ("", "s", "gate", "bridge")
]
TEXTS = [" ".join(WORDS), "Where is the key? Who has it, and when?", "Ünïcödé – «quoted» naïve."]
TOKENIZER = word_piece(TEXTS)
SMALL: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DEBERTA: dict[str, Any] = SMALL | {
    "relative_attention": True,
    "position_buckets": 16,
    "max_relative_positions": -1,
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
READERS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**SMALL),
    "deberta-v2": DebertaV2Config(**DEBERTA),
}


def causal(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model whose weights are large enough for its texts to depend on prompt and adapters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CAUSAL[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.to(dtype)


def reader(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = AutoModelForQuestionAnswering.from_config(copy.deepcopy(READERS[kind]))
    torch.manual_seed(0)  # here: how many numbers a model draws for itself is not ours to say
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.to(dtype)
