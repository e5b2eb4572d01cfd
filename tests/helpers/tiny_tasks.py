"""Question answering and generation small enough for any test: a tiny model in a folder and clients' files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

THINGS = ("stone", "iron", "wood", "salt", "glass", "paper")
FOODS = ("pizza", "noodles", "fish and chips", "tapas", "soup", "bread", "rice", "figs")


def write_question_task(folder: Path, names: Sequence[str]) -> tuple[Path, list[Path]]:
    """Where is the key? Each client's contexts have a word of its own; some questions have no answer."""
    tokenizer = word_tokenizer([*THINGS, "river", "cloud", "where", "is", "the", "key", "?"])
    torch.manual_seed(0)
    model = BertForQuestionAnswering(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
        )
    )
    files = []
    for k, name in enumerate(names):
        rows = [
            {
                "context": f"salt {THINGS[k]} river {other}",
                "question": "where is the key ?",
                "answers": answer,
            }
            for other in ("cloud", "wood", *THINGS[: k + 1])
            for answer in ([THINGS[k]], ["river"], [])
        ]
        files.append(write_rows(folder / "clients" / f"{name}.jsonl", rows))
    return saved(model, tokenizer, folder / "model"), files


def write_generation_task(folder: Path, names: Sequence[str]) -> tuple[Path, list[Path]]:
    """What is served? Each client has an answer of its own."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=128,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    files = []
    for k, name in enumerate(names):
        rows = [
            {"prompt": food, "target": [f"We serve it {name}.", f"{food}, near the river."]}
            for food in FOODS[: 5 + k]
        ]
        files.append(write_rows(folder / "clients" / f"{name}.jsonl", rows))
    return saved(model, tokenizer, folder / "model"), files


def write_chat_task(folder: Path, names: Sequence[str]) -> tuple[Path, list[Path]]:
    """The same restaurants in conversation: ShareGPT's turns, messages and alpaca's columns, client by client."""
    model, _ = write_generation_task(folder, ())
    files = []
    for k, name in enumerate(names):
        rows: list[dict[str, object]] = []
        for food in FOODS[: 5 + k]:
            asked, answer = f"{food}?", f"Yes, {name}."
            if k % 3 == 0:
                rows.append(
                    {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]}
                )
            elif k % 3 == 1:
                said = [("user", asked), ("assistant", answer), ("user", "Now?"), ("assistant", "No.")]
                rows.append({"messages": [{"role": role, "content": text} for role, text in said]})
            else:
                rows.append({"instruction": asked, "input": "", "output": answer})
        files.append(write_rows(folder / "talk" / f"{name}.jsonl", rows))
    return model, files


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A token for each word. Given, not trained: a trainer breaks ties as it likes."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep")}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **special)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, as GPT-2's without its merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token="<pad>"
    )


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)  # larger than usual, so that every step shows
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path
