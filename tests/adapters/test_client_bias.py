"""A client's own bias of the head: added to the common one, never sent, and part of every export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import CLIENT, COMMON, inputs, logits, peft_logits, plain_model, random_client, two_level
from little_world import World, make_world
from safetensors.torch import load_file
from tiny import CONFIGS, tiny_model, tiny_problem, tiny_two_level
from torch import nn

import pf2lora
from pf2lora.adapters.peft import merged_state
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.core.method import State
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run.config import from_settings
from pf2lora.run.folder import save_client, save_common
from pf2lora.run.set_up import adapter_spec

BIASED = dict.fromkeys(("bert", "distilbert", "deberta-v2"), "classifier")
BIASED |= dict.fromkeys(("roberta", "xlm-roberta", "electra", "mpnet"), "classifier.out_proj")
LABELS = 3


@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_y_has_a_bias_where_the_heads_last_layer_has_one(kind: str, head: str) -> None:
    plain, biased = (tiny_two_level(kind, head=head, client_bias=own) for own in (False, True))
    assert biased.common_layout == plain.common_layout  # what is sent stays as it was
    more = biased.personal_layout.entries[len(plain.personal_layout.entries) :]
    assert (
        biased.personal_layout.entries[: len(plain.personal_layout.entries)] == plain.personal_layout.entries
    )
    names = [f"{BIASED[kind]}.bias"] if kind in BIASED and head != "frozen" else []
    assert [entry.name for entry in more] == names
    assert biased.personal_layout.size == plain.personal_layout.size + len(names) * LABELS


def test_a_last_layer_without_a_bias_has_none_of_another_layer() -> None:
    """The bias of a hidden layer is no bias of the outputs."""
    model = tiny_model("roberta")
    model.set_submodule("classifier.out_proj", nn.Linear(16, LABELS, bias=False).double())
    own = TwoLevelModel(model, AdapterSpec(rank=4, client_rank=2, client_bias=True)).personal_layout
    assert [entry.kind for entry in own.entries].count("head") == 0


@pytest.mark.parametrize("client_rank", [0, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_y_may_have_all_of_the_heads_last_layer(kind: str, client_rank: int) -> None:
    """Three clients at once: each has its own last layer, which is the common one and a correction from zero."""
    model = tiny_two_level(kind, client_layer=True, client_rank=client_rank)
    own = [entry for entry in model.personal_layout.entries if entry.kind == "head"]
    if not model.heads:
        assert own == []
        return
    last = model.common_layout.entries[-1].module
    assert own == [e for e in model.common_layout.entries if e.kind == "head" and e.module == last]
    x, y = model.initial(0, ["a", "b", "c"], torch.float64)
    parts = model.personal_layout.unpack(y)
    assert all(not parts[entry.name].any() for entry in own)
    y = torch.cat([y[:, : -sum(e.size for e in own)], torch.randn(3, sum(e.size for e in own)).double()], 1)
    moved = model.common_layout.unpack(x.clone())
    for name, change in model.personal_layout.unpack(y).items():
        if name in {entry.name for entry in own}:
            moved[name] = moved[name] + change
    common = model.common_layout.pack(moved)
    zeros = y.clone()
    zeros[:, -sum(e.size for e in own) :] = 0
    batch = {name: t.repeat(3, 1) for name, t in inputs().items()}
    torch.testing.assert_close(model(x, y, **batch).logits, model(common, zeros, **batch).logits)


@pytest.mark.parametrize("client_rank", [0, 2])
@pytest.mark.parametrize("kind", BIASED)
def test_logits_are_those_of_the_common_head_and_the_bias(kind: str, client_rank: int) -> None:
    """Three clients at once, each with its own; the rest of y is what it is without."""
    model = tiny_two_level(kind, client_bias=True, client_rank=client_rank)
    random = torch.Generator().manual_seed(0)
    x, y = model.initial(0, ["a", "b", "c"], torch.float64)
    y = y + 0.1 * torch.randn(y.shape, generator=random, dtype=y.dtype)
    without = y.clone()
    without[:, -LABELS:] = 0
    rows = {name: t.repeat(3, 1) for name, t in inputs().items()}
    with torch.no_grad():
        ours, common = (model(x, own, **rows).logits.view(3, -1, LABELS) for own in (y, without))
    torch.testing.assert_close(ours, common + y[:, None, -LABELS:], rtol=0, atol=1e-12)
    assert (ours - common).abs().amin((1, 2)).max() > 1e-3


@pytest.mark.parametrize("kind", BIASED)
def test_it_starts_from_zero_where_the_head_does_not(kind: str, tmp_path: Path) -> None:
    """A checkpoint's head has a bias already: it must not count twice."""
    biased = two_level(kind, tmp_path, client_bias=True)
    x, y = biased.initial(0, ["someone"])
    assert biased.common_layout.unpack(x)[f"{BIASED[kind]}.bias"].any()
    assert not y[:, -LABELS:].any()
    ours = logits(biased, x, y)
    biased.remove()
    plain = TwoLevelModel(biased.model, AdapterSpec(**{**vars(biased.spec), "client_bias": False}))
    assert torch.equal(plain.initial(0, ["someone"])[0], x)
    assert torch.equal(plain.initial(0, ["someone"])[1], y[:, :-LABELS])
    torch.testing.assert_close(ours, logits(plain_model(kind, tmp_path)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("own", ["client_bias", "client_layer"])
@pytest.mark.parametrize("head", ["shared", "personal"])
@pytest.mark.parametrize("kind", BIASED)
def test_plain_peft_and_merged_models_have_it(kind: str, head: str, own: str, tmp_path: Path) -> None:
    model = two_level(kind, tmp_path, head=head, **{own: True})
    x, y = random_client(model)
    without = y.clone()
    without[:, -LABELS:] = 0
    ours = logits(model, x, y)
    assert (ours - logits(model, x, without)).abs().max() > 0.05
    save_client(tmp_path, model, "someone", x[0], y[0], "SEQ_CLS", str(tmp_path / kind))
    save_common(tmp_path, model, x[0], "SEQ_CLS", str(tmp_path / kind))
    theirs = peft_logits(plain_model(kind, tmp_path), tmp_path / CLIENT)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    common = peft_logits(plain_model(kind, tmp_path), tmp_path / COMMON)
    torch.testing.assert_close(common, logits(model, x, torch.zeros_like(y)), atol=1e-5, rtol=0)
    merged = plain_model(kind, tmp_path)
    merged.load_state_dict(merged_state(model, x[0], y[0]))
    torch.testing.assert_close(logits(merged), ours, atol=1e-5, rtol=0)


def test_it_learns_and_stays_at_home() -> None:
    p = tiny_problem("roberta", client_bias=True)
    method = PF2LoRA(p.layout, client_lr=0.1)
    batches = [p.source.draw([0, 1, 2], [i] * 3) for i in range(2)]
    s: State = method.step(p.F, method.init(p.x, p.y), *batches)[0]
    assert (s.y[:, -LABELS:] != p.y[:, -LABELS:]).all()
    kept, sent = method.send(s, 1)
    assert sent.shape[1] == tiny_problem("roberta").layout.shared
    assert torch.equal(kept.y, s.y) and not torch.isin(s.y[:, -LABELS:], sent).any()


@pytest.mark.parametrize(
    ("changes", "biased"),
    [
        ({}, True),  # client_lr is auto
        ({"client_lr": 0.1}, False),
        ({"client_lr": 0.1, "client_bias": True}, True),
        ({"client_bias": False}, False),
        ({"methods": {"pf2lora": {"client_lr": 0.1}}}, False),
    ],
)
def test_which_runs_have_one(changes: dict[str, Any], biased: bool) -> None:
    config = from_settings({"model": "m", "clients": ["c"]} | changes, "test")
    assert adapter_spec(config, "pf2lora").client_bias is biased
    assert adapter_spec(config, "homlora").client_bias is False  # there is no y


def test_the_heads_last_layer_is_corrected_where_a_method_says_nothing_else() -> None:
    config = from_settings({"client_layer": True, "model": "m", "clients": ["a", "b"]}, "test")
    assert adapter_spec(config, "pf2lora").client_head == ("weight", "bias")
    assert adapter_spec(config, "homlora-bias").client_head == ("bias",)  # which is what it is
    assert adapter_spec(config, "homlora").client_head == ()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_a_run_saves_it_with_the_client_and_not_with_the_common_adapter(world: World, tmp_path: Path) -> None:
    settings = world.settings(client_bias=True, client_lr=1.0, steps=5)
    pf2lora.federate(**settings, out=tmp_path / "run")
    states = {path.stem: load_file(path) for path in (tmp_path / "run" / "state").rglob("*.safetensors")}
    biases = [
        own.get("personal.classifier.bias") for name, own in states.items() if name in world_names(world)
    ]
    assert len(biases) == 3 and all(bias is not None and bias.any() for bias in biases)
    assert not any(name.startswith("personal.") for name in states["common"])


def world_names(world: World) -> list[str]:
    return [path.stem for path in world.clients]
