"""A tiny model in a folder, adapted, and the logits that it and plain PEFT give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tiny import CONFIGS, tiny_data, tiny_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel

RANK, CLIENT_RANK = 4, 2
CLIENT, COMMON = Path("clients") / "someone", Path("common")


def inputs() -> dict[str, Tensor]:
    """A few rows of different lengths."""
    tensors = tiny_data([6]).rows(torch.arange(6).numpy())
    return {name: tensors[name] for name in ("input_ids", "attention_mask")}


def plain_model(kind: str, folder: Path) -> PreTrainedModel:
    """The base model as a user would load it."""
    return AutoModelForSequenceClassification.from_pretrained(folder / kind, dtype=torch.float32).eval()


def saved_base(kind: str, folder: Path) -> Path:
    model = AutoModelForSequenceClassification.from_config(CONFIGS[kind])
    model.load_state_dict(tiny_model(kind, dtype=torch.float32).state_dict())
    model.save_pretrained(folder / kind)
    return folder / kind


def two_level(kind: str, folder: Path, **spec: Any) -> TwoLevelModel:
    base = load_model(AutoModelForSequenceClassification, str(saved_base(kind, folder)), torch.float32)
    settings: dict[str, Any] = {
        "rank": RANK,
        "client_rank": CLIENT_RANK,
        "scaling": 1.5,
        "client_scaling": 0.7,
    }
    return TwoLevelModel(base, AdapterSpec(**settings | spec))


def random_client(model: TwoLevelModel, seed: int = 0) -> tuple[Tensor, Tensor]:
    """An x and y that no training made: every entry counts."""
    random = torch.Generator().manual_seed(seed)
    x, y = model.initial(seed, ["someone"])
    x, y = (0.3 * torch.randn(t.shape, generator=random) + t for t in (x, y))
    return x, y


@torch.no_grad()
def logits(model: Any, *adapters: Tensor) -> Tensor:
    return model(*adapters, **inputs()).logits


def peft_logits(base: PreTrainedModel, folder: Path) -> Tensor:
    return logits(PeftModel.from_pretrained(base, str(folder)).eval())
