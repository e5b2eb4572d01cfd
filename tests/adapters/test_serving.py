"""Adapters of language models keep to the rules of LoRA servers, and PEFT loads them to the same logits.

The rules are vLLM's, as its `PEFTHelper` and `LoRAModel.from_local_checkpoint` check them: rank, alpha and targets are
there; no bias, no DoRA, no module saved whole; every tensor is some module's `lora_A.weight` or `lora_B.weight`; the
module's last name is one that the served model adapts. One scaling holds for all layers: alpha / r. vLLM itself packs
query, key and value, and gate and up; it takes them by their own names where the checkpoint has them apart
(`packed_modules_mapping`), and as they are where it has them packed, as Phi-3's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import random_client
from language_models import language_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.spec import ALL_LINEAR
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.run.folder import save_client, save_common

APART = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
PACKED = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
SERVED = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), APART) | {"phi3": PACKED}
DEFAULT_MAX_RANK = 16  # of vLLM's --max-lora-rank
IDS = torch.arange(2, 14)[None]


@dataclass
class Written:
    kind: str
    everywhere: bool  # all layers are adapted, not the default ones
    folder: Path
    logits: torch.Tensor  # of the client's model here


@pytest.fixture(scope="module", params=[(kind, all_) for kind in SERVED for all_ in (False, True)], ids=str)
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A model's adapters at the default ranks, of the default layers and of all, and the logits they give here."""
    (kind, everywhere), root = request.param, tmp_path_factory.mktemp("served")
    language_model(kind, torch.float32).save_pretrained(root / "base")
    base = load_model(AutoModelForCausalLM, str(root / "base"), torch.float32)
    targets = (ALL_LINEAR,) if everywhere else ()
    model = TwoLevelModel(base, AdapterSpec(targets=targets, scaling=1.5, client_scaling=0.7))
    x, y = random_client(model)
    save_client(root, model, "north", x[0], y[0], "CAUSAL_LM", str(root / "base"))
    save_common(root, model, x[0], "CAUSAL_LM", str(root / "base"))
    with torch.no_grad():
        return Written(kind, everywhere, root, model(x, y, input_ids=IDS).logits)


@pytest.mark.parametrize("folder", ["clients/north", "common"])
def test_vllms_rules_are_kept(written: Written, folder: str) -> None:
    config = json.loads((written.folder / folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert not config["modules_to_save"] and config["bias"] == "none"
    assert not config.get("use_dora") and not config.get("use_rslora")
    fused = written.kind == "phi3" and not written.everywhere  # query and value in one: twice the rank
    assert config["r"] == (2 if fused else 1) * (10 if folder == "clients/north" else 8)
    assert (config["r"] <= DEFAULT_MAX_RANK or fused) and not config["rank_pattern"]
    tensors = load_file(written.folder / folder / "adapter_model.safetensors")
    named = [re.fullmatch(r"base_model\.model\.(.+)\.(lora_[AB])\.weight", name) for name in tensors]
    assert all(named), "a server refuses a tensor that is no LoRA factor"
    modules = {match[1] for match in named if match}
    ends = {module.rpartition(".")[2] for module in modules}
    assert ends == SERVED[written.kind] if written.everywhere else ends < SERVED[written.kind]
    assert modules == set(config["target_modules"]) and len(tensors) == 2 * len(modules)
    served = language_model(written.kind)
    for module in modules:
        A, B = (tensors[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
        assert A.shape[0] == B.shape[1] == config["r"]
        assert (B.shape[0], A.shape[1]) == served.get_submodule(module).weight.shape
        assert config["lora_alpha"] == config["r"], "servers know one scaling for all layers"


def test_peft_gives_the_same_logits(written: Written) -> None:
    base = AutoModelForCausalLM.from_pretrained(written.folder / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, written.folder / "clients" / "north").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=IDS).logits, written.logits, atol=2e-3, rtol=1e-4)
