"""Adapters out: what plain PEFT and plain transformers load gives the logits that the run itself gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exporting import (
    CLIENT,
    CLIENT_RANK,
    COMMON,
    RANK,
    logits,
    peft_logits,
    plain_model,
    random_client,
    two_level,
)
from tiny import CONFIGS
from transformers import AutoModelForSequenceClassification, BertForMaskedLM

from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.peft import merged_state
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.run.folder import save_client, save_common

SHARED = [(kind, "shared") for kind in CONFIGS]
OTHERS = [(kind, head) for kind in ("bert", "deberta-v2", "gpt2") for head in ("personal", "frozen")]


@pytest.mark.parametrize(("kind", "head"), SHARED + OTHERS)
def test_plain_peft_gives_the_same_logits(kind: str, head: str, tmp_path: Path) -> None:
    model = two_level(kind, tmp_path, head=head)
    x, y = random_client(model)
    save_client(tmp_path, model, "someone", x[0], y[0], "SEQ_CLS", str(tmp_path / kind))
    save_common(tmp_path, model, x[0], "SEQ_CLS", str(tmp_path / kind))
    wanted = {CLIENT: logits(model, x, y), COMMON: logits(model, x, torch.zeros_like(y))}
    assert (wanted[CLIENT] - wanted[COMMON]).abs().max() > 1e-2
    for folder, ours in wanted.items():
        theirs = peft_logits(plain_model(kind, tmp_path), tmp_path / folder)
        torch.testing.assert_close(theirs, ours, atol=3e-5, rtol=0)


@pytest.mark.parametrize("client_rank", [0, CLIENT_RANK])
def test_methods_without_client_adapters_export_too(client_rank: int, tmp_path: Path) -> None:
    """HETLoRA's truncated x and Per-FedAvg's x after its own step are a client's whole model: there is no y."""
    model = two_level("roberta", tmp_path, client_rank=client_rank)
    x, y = random_client(model)
    for name, tensor in model.common_layout.unpack(x).items():  # as HETLoRA leaves a client of rank 2
        if name.endswith(".A"):
            tensor[:, 2:] = 0
        elif name.endswith(".B"):
            tensor[:, :, 2:] = 0
    save_client(tmp_path, model, "someone", x[0], y[0], "SEQ_CLS", "base")
    theirs = peft_logits(plain_model("roberta", tmp_path), tmp_path / CLIENT)
    torch.testing.assert_close(theirs, logits(model, x, y), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_client_is_one_lora_of_both_ranks(kind: str, tmp_path: Path) -> None:
    model = two_level(kind, tmp_path)
    x, y = random_client(model)
    save_client(tmp_path, model, "someone", x[0], y[0], "SEQ_CLS", "the/base")
    config = json.loads((tmp_path / CLIENT / "adapter_config.json").read_text())
    parts = 2 if kind in ("gpt2", "phi3") else 1  # query and value lie in one projection, each with its own A
    assert config["r"] == config["lora_alpha"] == parts * (RANK + CLIENT_RANK)
    assert config["peft_type"] == "LORA" and config["task_type"] == "SEQ_CLS"
    assert config["base_model_name_or_path"] == "the/base"
    assert config["target_modules"] == sorted(model.adapted)
    save_common(tmp_path, model, x[0], "SEQ_CLS", "the/base")
    common = json.loads((tmp_path / COMMON / "adapter_config.json").read_text())
    assert common["r"] == common["lora_alpha"] == parts * RANK
    assert sorted(p.name for p in (tmp_path / CLIENT).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
    ]


def test_projections_of_different_rank_in_one_adapter(tmp_path: Path) -> None:
    """GPT-2's fused projection has twice the rank of a plain one beside it."""
    model = two_level("gpt2", tmp_path, targets=("attn.c_attn", "mlp.c_fc"))
    x, y = random_client(model)
    save_client(tmp_path, model, "someone", x[0], y[0], "SEQ_CLS", "base")
    theirs = peft_logits(plain_model("gpt2", tmp_path), tmp_path / CLIENT)
    torch.testing.assert_close(theirs, logits(model, x, y), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "head"), SHARED + OTHERS)
def test_a_merged_model_needs_no_adapter(kind: str, head: str, tmp_path: Path) -> None:
    model = two_level(kind, tmp_path, head=head)
    x, y = random_client(model)
    plain = plain_model(kind, tmp_path)
    before = logits(plain)
    plain.load_state_dict(merged_state(model, x[0], y[0]))
    ours = logits(model, x, y)
    assert (before - ours).abs().max() > 1e-2
    torch.testing.assert_close(logits(plain), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", ["shared", "frozen"])
def test_what_the_checkpoint_lacks_travels_with_the_adapter(head: str, tmp_path: Path) -> None:
    """A masked language model has neither classifier nor pooler: both are made anew, and only here."""
    BertForMaskedLM(CONFIGS["bert"]).save_pretrained(tmp_path / "bert")

    def ours() -> TwoLevelModel:
        name = str(tmp_path / "bert")
        base = load_model(AutoModelForSequenceClassification, name, torch.float32, num_labels=3)
        return TwoLevelModel(base, AdapterSpec(rank=RANK, client_rank=CLIENT_RANK, head=head))

    torch.manual_seed(1)
    model = ours()
    x, y = random_client(model)
    save_client(tmp_path, model, "someone", x[0], y[0], "SEQ_CLS", "base")
    torch.manual_seed(2)
    torch.testing.assert_close(logits(ours(), x, y), logits(model, x, y), atol=0, rtol=0)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", num_labels=3).eval()
    torch.testing.assert_close(peft_logits(base, tmp_path / CLIENT), logits(model, x, y), atol=1e-5, rtol=0)
