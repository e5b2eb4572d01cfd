"""A base model in 4 or 8 bits: rounded as bitsandbytes rounds, with the same adapters on it, and as small as it is."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from tiny_language_models import CLIENTS, CONFIGS, TASK, loss_and_gradients, two_level, whole
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pf2lora.adapters import prequantised
from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.peft import merged_state
from pf2lora.adapters.quantised import KINDS, QuantisedLinear, dequantise, held_bytes, quantise
from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.second_order import differentiable_twice
from pf2lora.engines.batches import Batch
from pf2lora.errors import UserError


def quantised(kind: str, bits: str) -> tuple[TwoLevelModel, Tensor, Tensor]:
    """A language model whose layers are quantised."""
    model, x, y = two_level(kind)
    model.remove()
    quantise(model.model, bits, "cpu")
    return TwoLevelModel(model.model, AdapterSpec(rank=4, client_rank=2)), x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_is_that_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    layer = nn.Linear(192, 64, bias=False).to(dtype)
    ours = QuantisedLinear.of(layer, "nf4", "cpu")
    codes, state = functional.quantize_4bit(layer.weight.data, quant_type="nf4", blocksize=64)
    assert torch.equal(ours.codes, codes.flatten()) and torch.equal(ours.scales, state.absmax)
    assert torch.equal(ours.numbers(), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_rounding(bits: str, transposed: bool) -> None:
    """The nearest number there is, in blocks that need not be full; and nothing is lost on the way back."""
    torch.manual_seed(0)
    layer = Conv1D(19, 7) if transposed else nn.Linear(7, 19)
    nn.init.normal_(layer.weight)
    made = QuantisedLinear.of(layer, bits, "cpu")
    weight = layer.weight.T if transposed else layer.weight
    error = (made.numbers() - weight).abs()
    if bits == "int8":
        assert (error <= made.scales / 2 + 1e-7).all()
    else:
        assert error.max() <= 0.153 * made.scales.max()  # half of the widest gap between two quantiles
    back = made.plain()
    assert type(back) is type(layer) and back.weight.shape == layer.weight.shape
    rows = torch.randn(3, 7)
    torch.testing.assert_close(back(rows), made(rows))
    again = QuantisedLinear.of(back, bits, "cpu")
    assert torch.equal(again.codes, made.codes)


def test_a_layer_of_zeros_stays_one() -> None:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(layer.weight)
    for bits in KINDS:
        assert not QuantisedLinear.of(layer, bits, "cpu").numbers().any()


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi"])
def test_stacked_adapters_on_it_are_those_of_the_same_numbers(kind: str, bits: str, repeated: bool) -> None:
    """In one pass, on ordinary layers of the rounded numbers, and one client after the other: loss and gradients."""
    model, x, y = quantised(kind, bits)
    model.repeat_layers(repeated)
    batch = whole()
    stacked = loss_and_gradients(model, x, y, batch)
    rows = batch.tensors["input_ids"].shape[0] // CLIENTS
    for k in range(CLIENTS):
        own = {name: t[k * rows : (k + 1) * rows] for name, t in batch.tensors.items()}
        x_k, y_k = (t[k : k + 1].detach().requires_grad_() for t in (x, y))
        for alone, together in zip(loss_and_gradients(model, x_k, y_k, Batch(1, own)), stacked):
            torch.testing.assert_close(alone[0], together[k], rtol=1e-6, atol=1e-8)
    dequantise(model.model)
    for ordinary, ours in zip(loss_and_gradients(model, x, y, batch), stacked):
        torch.testing.assert_close(ours, ordinary, rtol=1e-9, atol=1e-12)


def test_it_has_a_second_derivative_where_it_needs_one() -> None:
    model, x, y = quantised("gpt2", "nf4")
    found = []
    for _ in range(2):
        with differentiable_twice():
            loss = TASK.loss(model, x, y, whole())
            (first,) = torch.autograd.grad(loss.sum(), y, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
        dequantise(model.model)
    assert found[0].norm() > 0
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_no_layer_keeps_its_numbers() -> None:
    model, x, y = quantised("llama", "nf4")
    shapes = {m.numbers().shape for m in model.model.modules() if isinstance(m, QuantisedLinear)}
    kept: list[torch.Size] = []
    with saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):  # type: ignore[func-returns-value]
        TASK.loss(model, x, y, whole())
    assert not shapes & set(kept) and not {s[::-1] for s in shapes} & set(kept)


@pytest.mark.parametrize(("bits", "of_a_number"), [("nf4", 0.5 + 4 / 64), ("int8", 1.0)])
def test_its_bytes(bits: str, of_a_number: float) -> None:
    """Those of the codes and their scales; embeddings, norms and the head are as before."""
    plain = tiny_model("llama", dtype=torch.bfloat16)
    before = held_bytes(plain)
    layers = [m for name, m in plain.named_modules() if isinstance(m, nn.Linear) and "layers." in name]
    numbers, outputs = sum(m.weight.numel() for m in layers), sum(m.out_features for m in layers)
    made = copy.deepcopy(plain)
    quantise(made, bits, "cpu")
    tables = len(layers) * 256 * 2 * 4
    scales = 4 * outputs if bits == "int8" else 0
    assert held_bytes(made) == before - 2 * numbers + of_a_number * numbers + scales + tables
    assert isinstance(made.score, nn.Linear)  # the head


def test_merging_gives_an_ordinary_model() -> None:
    for kind in ("gpt2", "llama"):
        model, x, y = quantised(kind, "nf4")
        ids = torch.arange(12)[None]
        with torch.no_grad():
            ours = model(x[:1], y[:1], input_ids=ids).logits
            state = merged_state(model, x[0], y[0])
            model.remove()
            model.model.load_state_dict(state)
            torch.testing.assert_close(model.model(input_ids=ids).logits, ours, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_that_was_quantised_otherwise_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prequantised, "find_spec", lambda package: None)  # as without the extra
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for method, words in [
        ("gptq", "is quantised by 'gptq', and only bitsandbytes' can be trained on: give the original"),
        ("bitsandbytes", r"needs the package '.*': pip install 'pf2lora\[quantised\]'"),
    ]:
        settings = json.loads(file.read_text())
        settings["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": True}
        file.write_text(json.dumps(settings))
        with pytest.raises(UserError, match=words):
            load_model(AutoModelForCausalLM, str(tmp_path), torch.float32)


def by_bitsandbytes(model: PreTrainedModel, folder: Path, bits: str, double: bool = False) -> PreTrainedModel:
    """The model as bitsandbytes quantises it, in memory and in the folder `small`."""
    model.save_pretrained(folder / "plain")
    how = BitsAndBytesConfig(
        load_in_4bit=bits != "int8",
        load_in_8bit=bits == "int8",
        bnb_4bit_quant_type="nf4" if bits == "int8" else bits,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=how, device_map={"": "cpu"}, dtype=torch.float32
    )
    theirs.save_pretrained(folder / "small")
    return theirs


def test_its_other_four_bits_are_refused_by_the_layer(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    by_bitsandbytes(AutoModelForCausalLM.from_config(CONFIGS["llama"]), tmp_path, "fp4")
    with pytest.raises(
        UserError, match=r"at 'model\.layers\.0\..*' has numbers of type 'fp4'; only nf4 and int8"
    ):
        load_model(AutoModelForCausalLM, str(tmp_path / "small"), torch.float32)


@pytest.mark.parametrize(("bits", "double"), [("nf4", False), ("nf4", True), ("int8", False)])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_checkpoint_of_bitsandbytes_loads(kind: str, bits: str, double: bool, tmp_path: Path) -> None:
    """The numbers that bitsandbytes has, in layers that train and can be moved."""
    functional = pytest.importorskip("bitsandbytes.functional")
    model, x, y = two_level(kind)
    model.remove()
    theirs = by_bitsandbytes(model.model.float(), tmp_path, bits, double)
    loaded = load_model(AutoModelForCausalLM, str(tmp_path / "small"), torch.float32)
    loaded.to(torch.device("cpu"))  # type: ignore[arg-type]
    pairs = 0
    for place, layer in theirs.named_modules():
        if "bit" not in type(layer).__name__:
            continue
        own, pairs = loaded.get_submodule(place), pairs + 1
        assert isinstance(own, QuantisedLinear) and own.transposed is (kind == "gpt2")
        if bits == "nf4":  # by hand: bitsandbytes' kernel for CPUs errs where a row is shorter than a block
            state, packed = layer.weight.quant_state, layer.weight.data.flatten()
            scales = state.absmax
            if double:
                scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
            numbers = state.code[torch.stack([packed >> 4, packed & 15], 1).flatten().long()]
            expected = (numbers.view(-1, state.blocksize) * scales.unsqueeze(1)).view(state.shape)
        else:
            expected = layer.weight.CB * layer.weight.SCB.unsqueeze(1) / 127
        torch.testing.assert_close(own.numbers(), expected, rtol=1e-6, atol=1e-9)
    assert pairs == sum(isinstance(m, QuantisedLinear) for m in loaded.modules()) > 0
    ours = TwoLevelModel(loaded, AdapterSpec(rank=4, client_rank=2))
    start = [t.detach().float().requires_grad_() for t in (x, y)]
    loss, *slopes = loss_and_gradients(ours, start[0], start[1], whole())
    assert torch.isfinite(loss).all() and all(s.norm() > 0 for s in slopes)
    assert not hasattr(loaded.config, "quantization_config")
