"""Tiny random models of every supported architecture, and small classification data for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers import BertConfig, DebertaV2Config, GPT2Config, LlamaConfig, MPNetConfig, RobertaConfig

from pf2lora.adapters import AdapterSpec, TwoLevelModel
from pf2lora.data.batches import Encoded

VOCABULARY, WIDTH, LABELS = 50, 16, 3
SMALL = {"vocab_size": VOCABULARY, "num_labels": LABELS, "pad_token_id": 1}
ENCODER = SMALL | {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**ENCODER),
    "roberta": RobertaConfig(**ENCODER, type_vocab_size=1),
    "mpnet": MPNetConfig(**ENCODER),
    "deberta-v2": DebertaV2Config(
        **ENCODER,
        relative_attention=True,
        position_buckets=8,
        max_relative_positions=-1,
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        type_vocab_size=0,
        pooler_hidden_size=WIDTH,
    ),
    "gpt2": GPT2Config(**SMALL, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=40),
    "llama": LlamaConfig(**ENCODER, num_key_value_heads=1),
}


def tiny_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random classifier; the weights are larger than usual so that gradients are far from zero."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(CONFIGS[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
    return model.to(dtype).eval()


def tiny_two_level(kind: str, **spec: object) -> TwoLevelModel:
    return TwoLevelModel(tiny_model(kind), AdapterSpec(**({"rank": 4, "client_rank": 2} | spec)))  # type: ignore[arg-type]


def tiny_data(sizes: Sequence[int], seed: int = 0, longest: int = 12, pad: int = 1) -> Encoded:
    """Random tokens of random length, right-padded, for clients of different sizes."""
    random = np.random.default_rng(seed)
    total = sum(sizes)
    lengths = random.integers(3, longest + 1, total)
    tokens = random.integers(3, VOCABULARY, (total, longest))
    tokens[np.arange(longest)[None, :] >= lengths[:, None]] = pad
    labels = random.integers(0, LABELS, total)
    starts = tuple(int(s) for s in np.concatenate([[0], np.cumsum(sizes)]))
    return Encoded(
        {"input_ids": torch.from_numpy(tokens)},
        {"labels": torch.from_numpy(labels)},
        lengths,
        starts,
        multiple=1,
    )
