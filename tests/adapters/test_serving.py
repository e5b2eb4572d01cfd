"""Adapters of language models keep to the rules of LoRA servers, and PEFT loads them to the same logits.

The rules are vLLM's, as its `PEFTHelper` and `LoRAModel.from_local_checkpoint` check them: rank, alpha and targets are
there; no bias, no DoRA, no module saved whole; every tensor is some module's `lora_A.weight` or `lora_B.weight`; the
module's last name is one that the served model adapts. One scaling holds for all layers: alpha / r.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import random_client
from peft import PeftModel
from safetensors.torch import load_file
from tiny_text_models import causal
from transformers import AutoModelForCausalLM

from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.run.folder import save_client, save_common

SERVED = {"llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}}
DEFAULT_MAX_RANK = 16  # of vLLM's --max-lora-rank


@pytest.fixture(scope="module", params=[(), tuple(sorted(SERVED["llama"]))], ids=["default", "all"])
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A Llama's adapters at the default ranks, of the default layers and of all, and the logits they give here."""
    root = tmp_path_factory.mktemp("served")
    causal("llama", torch.float32).save_pretrained(root / "base")
    base = load_model(AutoModelForCausalLM, str(root / "base"), torch.float32)
    model = TwoLevelModel(base, AdapterSpec(targets=request.param, scaling=1.5, client_scaling=0.7))
    x, y = random_client(model)
    save_client(root, model, "north", x[0], y[0], "CAUSAL_LM", str(root / "base"))
    save_common(root, model, x[0], "CAUSAL_LM", str(root / "base"))
    with torch.no_grad():
        return root, model(x, y, input_ids=torch.arange(12)[None]).logits


@pytest.mark.parametrize("folder", ["clients/north", "common"])
def test_vllms_rules_are_kept(written: tuple[Path, torch.Tensor], folder: str) -> None:
    config = json.loads((written[0] / folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert not config["modules_to_save"] and config["bias"] == "none"
    assert not config.get("use_dora") and not config.get("use_rslora")
    assert config["r"] <= DEFAULT_MAX_RANK and not config["rank_pattern"]
    tensors = load_file(written[0] / folder / "adapter_model.safetensors")
    named = [re.fullmatch(r"base_model\.model\.(.+)\.(lora_[AB])\.weight", name) for name in tensors]
    assert all(named), "a server refuses a tensor that is no LoRA factor"
    modules = {match[1] for match in named if match}
    assert {module.rpartition(".")[2] for module in modules} <= SERVED["llama"]
    assert modules == set(config["target_modules"]) and len(tensors) == 2 * len(modules)
    for module in modules:
        A, B = (tensors[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
        assert A.shape[0] == B.shape[1] == config["r"]
        assert config["lora_alpha"] == config["r"], "servers know one scaling for all layers"


def test_peft_gives_the_same_logits(written: tuple[Path, torch.Tensor]) -> None:
    root, ours = written
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, root / "clients" / "north").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=torch.arange(12)[None]).logits, ours, atol=1e-5, rtol=0)
