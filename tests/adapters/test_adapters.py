"""The two-level adapter in real architectures: sizes, defaults, targets, initialisation, precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import CONFIGS, WIDTH, Problem, tiny_model, tiny_problem, tiny_two_level
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    GPT2Config,
    PretrainedConfig,
    RobertaConfig,
)

from pf2lora.adapters.architectures import ARCHITECTURES
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.core.randomness import keep_mask
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.pf2lora import PF2LoRA

ROBERTA_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
DEBERTA_BASE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
GPT2_MEDIUM: dict[str, Any] = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
GPT2_XL: dict[str, Any] = {"n_embd": 1600, "n_layer": 48, "n_head": 25}


@pytest.mark.parametrize(
    ("auto", "config", "ranks", "count"),
    [
        (AutoModelForSequenceClassification, RobertaConfig(), (8, 0), 294_912),
        (AutoModelForSequenceClassification, RobertaConfig(), (8, 2), 368_640),
        (AutoModelForSequenceClassification, RobertaConfig(**ROBERTA_LARGE), (8, 0), 786_432),
        (AutoModelForSequenceClassification, RobertaConfig(**ROBERTA_LARGE), (8, 2), 983_040),
        (AutoModelForSequenceClassification, DebertaV2Config(**DEBERTA_BASE), (8, 4), 442_368),
        (AutoModelForCausalLM, GPT2Config(**GPT2_MEDIUM), (4, 0), 393_216),
        (AutoModelForCausalLM, GPT2Config(**GPT2_MEDIUM), (4, 2), 589_824),
        (AutoModelForCausalLM, GPT2Config(**GPT2_XL), (4, 0), 1_228_800),
        (AutoModelForCausalLM, GPT2Config(**GPT2_XL), (4, 2), 1_843_200),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_papers(
    auto: Any, config: PretrainedConfig, ranks: tuple[int, int], count: int
) -> None:
    with torch.device("meta"):
        model = auto.from_config(config)
    two_level = TwoLevelModel(model, AdapterSpec(rank=ranks[0], client_rank=ranks[1]))
    assert two_level.common_layout.adapter_size + two_level.personal_layout.size == count
    assert two_level.personal_layout.shared == 0


TARGETS = {kind: ["query", "value"] for kind in ("bert", "roberta", "xlm-roberta", "electra")}
TARGETS |= {
    "mpnet": ["attn.q", "attn.v"],
    "distilbert": ["q_lin", "v_lin"],
    "deberta-v2": ["query_proj", "value_proj"],
    "gpt2": ["c_attn.q", "c_attn.v"],
    "phi3": ["qkv_proj.q", "qkv_proj.v"],
}
FUSED = ("gpt2", "phi3")  # counted in test_language_models.py


@pytest.mark.parametrize("kind", CONFIGS)
def test_query_and_value_by_default_as_many_numbers_as_peft(kind: str) -> None:
    model = tiny_two_level(kind, client_rank=0, head="frozen")
    targets = TARGETS.get(kind, ["q_proj", "v_proj"])
    assert len(model.layer_names) == 4
    for target in targets:
        assert sum(n.endswith(f".{target}") for n in model.layer_names) == 2
    if kind not in FUSED:
        theirs = get_peft_model(tiny_model(kind), LoraConfig(r=model.spec.rank, target_modules=targets))
        trained = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
        assert model.common_layout.size == trained


def test_the_readme_names_every_kind() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf8")
    rows = [
        line.split("|")[2] for line in readme.splitlines() if line.startswith(("| encoders", "| language"))
    ]
    assert {name.strip(" `") for row in rows for name in row.split(",")} == set(ARCHITECTURES) == set(CONFIGS)


def test_heads_that_are_new_beside_the_classifier_are_trained_with_it() -> None:
    assert set(tiny_two_level("distilbert").heads) == {"pre_classifier", "classifier"}
    assert set(tiny_two_level("electra").heads) == {"classifier.dense", "classifier.out_proj"}
    assert set(tiny_two_level("deberta-v2").heads) == {"pooler.dense", "classifier"}
    assert set(tiny_two_level("roberta").heads) == {"classifier.dense", "classifier.out_proj"}
    assert set(tiny_two_level("llama").heads) == {"score"}
    assert tiny_two_level("llama", head="frozen").heads == {}


def test_gpt2s_key_part_is_left_alone() -> None:
    two_level = tiny_two_level("gpt2")
    x, y = two_level.initial(0, ["a", "b"], torch.float64)
    seen: list[torch.Tensor] = []
    layer = two_level.adapted["transformer.h.0.attn.c_attn"]
    layer.register_forward_hook(lambda module, args, out: seen.append(out))
    tokens = torch.randint(3, 50, (4, 6))
    two_level(x, y, input_ids=tokens)
    two_level(x + 1, y + 1, input_ids=tokens)
    plain, changed = seen
    q, k, v = (slice(i * WIDTH, (i + 1) * WIDTH) for i in range(3))
    assert torch.equal(plain[..., k], changed[..., k])
    assert (plain[..., q] != changed[..., q]).all() and (plain[..., v] != changed[..., v]).all()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("value",), ["0.attention.self.value", "1.attention.self.value"]),
        (("attention.self.key",), ["0.attention.self.key", "1.attention.self.key"]),
        (("roberta.encoder.layer.1.attention.self.query",), ["1.attention.self.query"]),
        (("*.1.*.query", "*.0.*.value"), ["0.attention.self.value", "1.attention.self.query"]),
        (("*.layer.0.output.dense",), ["0.output.dense"]),
    ],
)
def test_targets_by_name_ending_or_pattern(targets: tuple[str, ...], expected: list[str]) -> None:
    names = tiny_two_level("roberta", targets=targets).layer_names
    assert names == [f"roberta.encoder.layer.{name}" for name in expected]


def test_an_ending_is_a_whole_part_of_the_name() -> None:
    """ "query_proj" is not "pos_query_proj"."""
    config = DebertaV2Config(**(CONFIGS["deberta-v2"].to_dict() | {"share_att_key": False}))
    model = TwoLevelModel(tiny_model("deberta-v2", config=config), AdapterSpec(4, 2))
    assert not [n for n in model.layer_names if "pos_" in n] and len(model.layer_names) == 4


def test_unknown_targets_list_the_candidates() -> None:
    with pytest.raises(UserError, match=r"'q_proj'.*roberta.*choose from: dense, key, query, value$"):
        tiny_two_level("roberta", targets=("query", "q_proj"))
    model = tiny_model("roberta")
    model.config.model_type = "unheard-of"  # type: ignore[misc]
    with pytest.raises(
        UserError, match=r"no default targets are known.*unheard-of.*dense, key, query, value$"
    ):
        TwoLevelModel(model, AdapterSpec(4, 2))


# ---- initialisation ----


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_start_is_the_base_model(kind: str) -> None:
    """B = D = 0: the logits are those of the untouched model, for every client."""
    base, two_level = tiny_model(kind), tiny_two_level(kind)
    x, y = two_level.initial(0, ["a", "b"], torch.float64)
    tokens = torch.randint(3, 50, (6, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 4:], tokens[1, 4:] = 0, 1
    expected = base(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(
        two_level(x, y, input_ids=tokens, attention_mask=mask).logits, expected, rtol=0, atol=1e-12
    )
    after = two_level.model(input_ids=tokens, attention_mask=mask).logits  # nothing stays bound
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)
    two_level.remove()
    restored = two_level.model(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(restored, expected, rtol=0, atol=1e-12)
    assert {n for n, _ in two_level.model.named_parameters()} == {n for n, _ in base.named_parameters()}


@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_padded_row_has_the_logits_that_it_has_alone(kind: str) -> None:
    p = tiny_problem(kind)
    assert p.model is not None
    random = torch.Generator().manual_seed(0)
    tokens, lengths = torch.randint(3, 50, (6, 9), generator=random), [9, 4, 1, 7, 9, 5]
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    together = p.model(p.x, p.y, input_ids=torch.where(mask == 1, tokens, 1), attention_mask=mask).logits
    for i, length in enumerate(lengths):
        own = p.x[i // 2 : i // 2 + 1], p.y[i // 2 : i // 2 + 1]
        alone = p.model(*own, input_ids=tokens[i : i + 1, :length]).logits
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-11)


def test_the_same_a_for_all_each_its_own_c_uniform_as_lora() -> None:
    two_level = tiny_two_level("roberta", rank=8, client_rank=4)
    x, y = two_level.initial(3, ["a", "b", "c"])
    assert x.dtype == y.dtype == torch.float32 and (x == x[:1]).all()
    common, own = two_level.common_layout.unpack(x), two_level.personal_layout.unpack(y)
    bound = 1 / math.sqrt(WIDTH)  # Kaiming-uniform with a = √5
    A = torch.stack([t[0] for n, t in common.items() if n.endswith(".A")])
    C = torch.stack([t for n, t in own.items() if n.endswith(".C")])
    for values in (A, C):
        assert 0.95 * bound < values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert len(values.unique()) > 0.99 * values.numel()  # no layer, no client is a copy of another
    assert not any(t.any() for n, t in {**common, **own}.items() if n.endswith((".B", ".D")))


def test_a_clients_start_belongs_to_its_name() -> None:
    two_level = tiny_two_level("roberta")
    _, y = two_level.initial(0, ["a", "b"])
    _, swapped = two_level.initial(0, ["b", "x", "a"])
    assert torch.equal(y[0], swapped[2]) and torch.equal(y[1], swapped[0])


def test_the_scalings_are_factors_of_the_products() -> None:
    """s = 2 with B equals s = 1 with 2B, and likewise s̃ and D."""
    p, q = tiny_problem("roberta", scaling=2.0, client_scaling=3.0), tiny_problem("roberta")

    def scaled(problem: Problem, part: str, by: float) -> torch.Tensor:
        assert problem.model is not None
        layout = problem.model.common_layout if part == "B" else problem.model.personal_layout
        flat = problem.x if part == "B" else problem.y
        return layout.pack(
            {n: t * by if n.endswith(f".{part}") else t for n, t in layout.unpack(flat).items()}
        )

    batch = p.source.draw([0, 1, 2], [0, 0, 0])
    torch.testing.assert_close(p.F(p.x, p.y, batch), q.F(scaled(q, "B", 2.0), scaled(q, "D", 3.0), batch))


def test_dropout_acts_on_the_adapters_input_and_keeps_its_mean() -> None:
    """`W_0 u + s·B A (mask ∘ u)/(1 − p)`: the base's own path is whole."""
    two_level = tiny_two_level("roberta", dropout=0.25, client_rank=0, scaling=1.5)
    layer = two_level.adapted["roberta.encoder.layer.1.attention.self.value"]
    x = torch.randn(
        2, two_level.common_layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    views, key = two_level.common_layout.unpack(x), torch.tensor([11, 12])
    layer.bind(two_level.factors(x, torch.zeros(2, 0, dtype=torch.float64))[0], key)
    u = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = keep_mask(key, layer.number, u.shape, 0.25)
    assert 0 < kept.double().mean() < 1
    A, B = (views[f"{layer.parts[0].name}.{kind}"].repeat_interleave(2, 0) for kind in "AB")
    expected = layer.base(u) + 1.5 * (u * kept / 0.75) @ A.mT @ B.mT
    torch.testing.assert_close(layer(u), expected, rtol=0, atol=1e-12)


# ---- precision ----


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_bfloat16_base_with_float32_adapters(kind: str) -> None:
    exact = tiny_problem(kind, model=tiny_model(kind, dtype=torch.float32))
    half = tiny_problem(kind, model=tiny_model(kind, dtype=torch.float32).bfloat16())
    batch = exact.source.draw([0, 1, 2], [0, 0, 0])
    losses = [p.F(p.x.float(), p.y.float(), batch) for p in (exact, half)]
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[0], losses[1], rtol=0.08, atol=0.05)
    assert half.model is not None
    x, y = half.model.initial(0, ["a", "b", "c"])
    method = PF2LoRA(half.layout, lr=1e-5)
    *_, last = train(method, half.F, method.init(x, y), half.source, Schedule(rounds=1, steps=3))
    for tensor in (last.served.x, last.served.y, last.served.opt.mean, last.served.opt.square):
        assert tensor.dtype == torch.float32
    assert all(p.dtype == torch.bfloat16 for p in half.model.model.parameters())
    moved = (last.served.x - x).abs()
    assert 0 < moved.max() < 1e-3  # steps far below bfloat16's rounding are kept


def test_the_base_is_frozen_and_in_evaluation_mode() -> None:
    two_level = TwoLevelModel(tiny_model("roberta").train(), AdapterSpec(4, 2))
    assert not two_level.model.training
    assert not any(p.requires_grad for p in two_level.model.parameters())
    p = tiny_problem("roberta")
    x = p.x.clone().requires_grad_()
    p.F(x, p.y, p.source.draw([0, 1, 2], [0, 0, 0])).sum().backward()
    assert p.model is not None and all(q.grad is None for q in p.model.model.parameters())


def test_a_float64_head_starts_where_the_models_does() -> None:
    two_level = tiny_two_level("roberta")
    x, _ = two_level.initial(0, ["a"], torch.float64)
    start = two_level.common_layout.unpack(x)["classifier.dense.weight"][0]
    assert torch.equal(start, two_level.heads["classifier.dense"].base.weight)
