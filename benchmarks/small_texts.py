"""A small world for measurements with many clients on a CPU: a tiny random BERT and sentences that can be learned.

Each sentence has filling words and three of opinion, most of them of its label's kind. There are more such words than
one client's sentences show, so clients learn from each other.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

OPINIONS, FILLING, OPINED, AGREEING = 40, 60, 3, 0.9
"""Words of opinion for each label, filling words, words of opinion in a sentence, the share that agrees with it."""


def sentence(random: np.random.Generator) -> dict[str, str]:
    """A row: its text and its label."""
    label = int(random.integers(2))
    agree = random.random(OPINED) < AGREEING
    opinions = [f"{'bad' if (label == 0) == a else 'good'}{random.integers(OPINIONS)}" for a in agree]
    words = [*opinions, *(f"word{i}" for i in random.integers(FILLING, size=4))]
    random.shuffle(words)
    return {"text": " ".join(words), "label": ("negative", "positive")[label]}


def write_clients(folder: Path, clients: int, rows: int, seed: int = 0) -> list[str]:
    """A file for each client; the first clients have the same rows whatever their number."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for k in range(clients):
        random = np.random.default_rng([seed, k])
        lines = [json.dumps(sentence(random)) + "\n" for _ in range(rows)]
        files.append(folder / f"client-{k:04d}.jsonl")
        files[-1].write_text("".join(lines), encoding="utf8")
    return [str(file) for file in files]


def write_model(folder: Path, width: int = 32, layers: int = 1) -> str:
    """A random BERT whose tokens are the world's words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words += [f"{kind}{i}" for kind in ("bad", "good") for i in range(OPINIONS)]
    words += [f"word{i}" for i in range(FILLING)]
    number = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(number, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", number["[SEP]"]), ("[CLS]", number["[CLS]"])
    )
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)
