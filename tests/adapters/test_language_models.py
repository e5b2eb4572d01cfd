"""The language models that the README names: what is adapted in them, and that PEFT counts and computes the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import LANGUAGE_MODELS, adapted_model, language_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PretrainedConfig

from pf2lora.adapters.architectures import ARCHITECTURES
from pf2lora.adapters.spec import ALL_LINEAR, AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.errors import UserError
from pf2lora.run.folder import save_client

FUSED = ("gpt2", "phi3")
EVERY_KIND = pytest.mark.parametrize("kind", LANGUAGE_MODELS)


def peft_count(model: nn.Module, targets: list[str] | str) -> int:
    """The numbers that PEFT trains."""
    found = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    return sum(parameter.numel() for parameter in found.parameters() if parameter.requires_grad)


@EVERY_KIND
def test_query_and_value_by_default_as_many_numbers_as_peft(kind: str) -> None:
    model, _, _ = adapted_model(kind, 1, client_rank=0)
    names = model.layer_names
    assert len(names) == 4  # of two layers
    if kind in FUSED:  # PEFT can adapt such a projection as a whole only: as many as where they are apart
        assert {name.rpartition(".")[2] for name in names} == {"q", "v"}
        apart = copy.deepcopy(LANGUAGE_MODELS["llama"])
        apart.num_key_value_heads = 4 if kind == "gpt2" else 2
        llama = language_model("llama", config=apart)
        assert model.common_layout.size == peft_count(llama, ["q_proj", "v_proj"])
    else:
        assert {name.rpartition(".")[2] for name in names} == {"q_proj", "v_proj"}
        assert model.common_layout.size == peft_count(language_model(kind), ["q_proj", "v_proj"])


@EVERY_KIND
def test_all_linear_is_pefts(kind: str) -> None:
    model, _, _ = adapted_model(kind, 1, client_rank=0, targets=(ALL_LINEAR,))
    assert model.common_layout.size == peft_count(language_model(kind), "all-linear")
    assert not any(name.startswith("lm_head") for name in model.layer_names)


def test_all_linear_leaves_a_classifier_to_the_head() -> None:
    from tiny import tiny_model

    model = TwoLevelModel(tiny_model("roberta"), AdapterSpec(rank=4, client_rank=2, targets=(ALL_LINEAR,)))
    assert len(model.layer_names) == 2 * 6 and not any("classifier" in name for name in model.layer_names)
    with pytest.raises(UserError, match="no layer matches the target 'all-liner'"):
        TwoLevelModel(tiny_model("roberta"), AdapterSpec(targets=("all-liner",)))


@EVERY_KIND
@pytest.mark.parametrize("targets", [(), (ALL_LINEAR,)], ids=["query and value", "all-linear"])
def test_peft_gives_the_same_logits(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Also of phi3's fused projection, whose key and value are narrower than its query."""
    model, x, y = adapted_model(kind, 1, torch.float32, targets=targets)
    ids = torch.arange(2, 30).view(2, 14)
    with torch.no_grad():
        ours = model(x, y, input_ids=ids, use_cache=False).logits
        base = model(x, torch.zeros_like(y), input_ids=ids, use_cache=False).logits
    assert (ours - base).abs().max() > 1e-2
    save_client(tmp_path, model, "someone", x[0].detach(), y[0].detach(), "CAUSAL_LM", "base")
    theirs = PeftModel.from_pretrained(
        language_model(kind, torch.float32), tmp_path / "clients" / "someone"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", FUSED)
def test_both_parts_of_a_fused_projection_are_one_lora_of_twice_the_rank(kind: str, tmp_path: Path) -> None:
    """At the default ranks 20, which is above what vLLM takes unless it is told (`--max-lora-rank`)."""
    model, x, y = adapted_model(kind, 1, torch.float32, rank=AdapterSpec().rank)
    save_client(tmp_path, model, "someone", x[0].detach(), y[0].detach(), "CAUSAL_LM", "base")
    config = json.loads((tmp_path / "clients" / "someone" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 2 * (AdapterSpec().rank + AdapterSpec().client_rank) == 20


# ---- windows: layers that look some tokens back at most ----

WINDOW = 5
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "phi3": {},
    "gemma2": {},
    "gemma3_text": BOTH,
    "qwen2": BOTH | {"use_sliding_window": True},
    "qwen3": BOTH | {"use_sliding_window": True},
    "smollm3": BOTH | {"use_sliding_window": True},
}
SEVEN_WINDOWS = pytest.mark.parametrize("kind", WINDOWS)


def with_window(kind: str) -> PretrainedConfig:
    config = copy.deepcopy(LANGUAGE_MODELS[kind])
    for name, value in ({"sliding_window": WINDOW} | WINDOWS[kind]).items():
        setattr(config, name, value)
    return config


def windowed(kind: str, attention: str) -> TwoLevelModel:
    """At a start where the model is the base model."""
    base = language_model(kind, torch.float32, with_window(kind))
    if attention == "sdpa" and not base._supports_sdpa:
        pytest.skip(f"{kind} has no fused attention")
    base.set_attn_implementation(attention)
    return TwoLevelModel(base, AdapterSpec(rank=4, client_rank=2))


def test_every_kind_that_can_have_a_window_is_here() -> None:
    assert set(WINDOWS) == {
        kind for kind, config in LANGUAGE_MODELS.items() if hasattr(config, "sliding_window")
    }


@SEVEN_WINDOWS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_windows_are_those_of_the_model(kind: str, attention: str) -> None:
    """Rows that are longer than the window, against transformers' own masks."""
    model = windowed(kind, attention)
    x, y = model.initial(0, ["one"])
    ids = torch.arange(2, 30).view(2, 14)
    with torch.no_grad():
        ours = model(x, y, input_ids=ids).logits
        torch.testing.assert_close(ours, model.model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        wide = language_model(kind, torch.float32)(input_ids=ids).logits
    assert (ours - wide)[:, WINDOW:].abs().max() > 0.1  # it matters


@SEVEN_WINDOWS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_examples_that_are_longer_than_the_window(kind: str, attention: str) -> None:
    """Their losses are those of each by itself."""
    model = windowed(kind, attention)
    x, y = model.initial(0, ["one"])
    ids, lengths = torch.arange(2, 21)[None], (11, 8)
    examples = torch.cat([torch.full((n,), 1 + i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]

    def losses(ids: torch.Tensor, **packed: torch.Tensor) -> torch.Tensor:
        counted = torch.ones(ids.shape)
        return model.token_losses(x, y, ids.roll(-1, 1), counted, None, input_ids=ids, **packed)[0]

    together = losses(ids, examples=examples, position_ids=positions)
    alone = torch.cat([losses(part)[:-1] for part in ids.split(lengths, 1)])
    last = torch.tensor(lengths).cumsum(0) - 1  # what follows an example is another's
    kept = torch.ones(ids.shape[1], dtype=torch.bool).index_fill(0, last, False)
    torch.testing.assert_close(together[kept], alone, rtol=1e-4, atol=1e-4)


def test_the_readme_names_them_all() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf8")
    line = next(line for line in readme.splitlines() if line.startswith("| language models"))
    causal = [name for name, known in ARCHITECTURES.items() if known.attention == "causal"]
    assert set(causal) == set(LANGUAGE_MODELS)
    assert set(causal) == {part.strip(" `") for part in line.split("|")[2].split(",")}
