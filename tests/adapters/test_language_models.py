"""The language models that the README names: what is adapted in them, and that PEFT counts and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from language_models import LANGUAGE_MODELS, adapted_model, language_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

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
    if kind in FUSED:  # a projection holds all three; two of them are adapted, each by its own factors
        assert {name.rpartition(".")[2] for name in names} == {"q", "v"}
        heads, shared, head, width = 4, 4 if kind == "gpt2" else 2, 8, 32
        expected = 2 * 4 * ((width + heads * head) + (width + shared * head))
        assert model.common_layout.size == expected
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


def test_the_readme_names_them_all() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf8")
    line = next(line for line in readme.splitlines() if line.startswith("| language models"))
    causal = [name for name, known in ARCHITECTURES.items() if known.attention == "causal"]
    assert set(causal) == set(LANGUAGE_MODELS)
    assert set(causal) == {part.strip(" `") for part in line.split("|")[2].split(",")}
