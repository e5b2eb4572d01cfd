"""What saves memory, recorded as CUDA graphs: the plain numbers, and less memory. Skipped without a CUDA device."""

from __future__ import annotations

import copy
import gc
from functools import partial

import numpy as np
import pytest
import torch
from language_models import configurations
from stand_in_graphs import StandInGraph, stepper_of
from tokenizers_for_tests import byte_level
from torch import Tensor
from transformers import AutoModelForCausalLM

from pf2lora.adapters.quantised import quantise
from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.engines.stepper import GraphStepper, PlainStepper
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
VOCABULARY, CLIENTS = 4096, 3
CONFIGS = configurations(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=128,
    pad_token_id=1,
)
TEXTS = [
    f"The {food} place is near the river, and open of an evening." for food in ("pizza", "noodle", "fish")
]
TASK = Generation(byte_level(TEXTS * 20), GenerationSettings(max_length=64, max_new_tokens=0))
PROMPTS = [
    [PromptRow(t[: 4 + 3 * i], (t[: 20 + 7 * k],)) for i, t in enumerate(TEXTS * 3)] for k in range(CLIENTS)
]
ROWS = TASK.encode(PROMPTS, training=True)


def model_of(kind: str, device: str, dtype: torch.dtype = torch.float32, bits: str = "") -> TwoLevelModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    model.to(dtype)
    if bits:
        quantise(model, bits, device)
    return TwoLevelModel(model.to(device), AdapterSpec(rank=4, client_rank=2))


def run(model: TwoLevelModel, device: str, *, graphs: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Where a run ends, and its last losses."""
    names = [str(k) for k in range(CLIENTS)]
    random = torch.Generator().manual_seed(1)
    x, y = (t + 0.05 * torch.randn(t.shape[1], generator=random) for t in model.initial(0, names))
    method = PF2LoRA(model.common_layout, lr=1e-3, client_lr=0.1)
    data = ROWS.to(torch.device(device))
    source = EncodedSource(data, names, 4, seeds=(seed,), alike=method.draws)
    begun = partial(TASK.loss, model), method.init(x, y), source, Schedule(2, 3)
    how = stepper_of(begun[0], graphs)
    *_, last = train(method, *begun, device=torch.device(device), stepper=how)
    return last.served.x.cpu(), last.stats.loss.cpu()


def test_recorded_steps_of_language_models_replay_their_own_batches(stand_in_graphs: None) -> None:
    """Batches with another number of targets have a recording of their own. On the CPU, by stand-ins for graphs."""
    plain, recorded = (run(model_of("llama", "cpu"), "cpu", graphs=graphs) for graphs in (False, True))
    assert StandInGraph.replays > 0
    for ours, expected in zip(recorded, plain):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def same_run(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Within the order of summation: where a gradient is nearly zero AdamW makes a step of a rounding, so that single
    numbers of x part (by up to 6e-4 where the weights differ by one rounding), and neither the loss (by 7e-6 of it at
    most, seen with 4 bits on an H200) nor the rest."""
    torch.testing.assert_close(ours[1], expected[1], rtol=2e-5, atol=2e-5)
    assert (ours[0] - expected[0]).abs().mean() < 2e-6


@pytest.mark.parametrize(("kind", "bits"), [("qwen2", ""), ("gemma2", "nf4")])
def test_a_rounding_is_the_same_run_and_another_batch_is_not(kind: str, bits: str) -> None:
    """What the runs below may part by: those of two models that differ by one rounding do, and no others."""
    plain, other = (model_of(kind, "cpu", bits=bits) for _ in range(2))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1 + 6e-8 * torch.randn_like(parameter))
    expected = run(plain, "cpu", graphs=False)
    same_run(run(other, "cpu", graphs=False), expected)
    with pytest.raises(AssertionError):
        same_run((expected[0], run(other, "cpu", graphs=False, seed=1)[1]), expected)


@NEEDS_CUDA
@pytest.mark.parametrize("bits", ["", "nf4", "int8"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_that_are_run_again_are_recorded(
    kind: str, bits: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain; recorded; recorded with layers that are run again: one run."""
    runs = []
    for graphs, repeated in ((False, False), (True, False), (True, True)):
        model = model_of(kind, "cuda", bits=bits)
        model.repeat_layers(repeated)
        runs.append(run(model, "cuda", graphs=graphs))
    assert "without a CUDA graph" not in caplog.text
    for other in runs[1:]:
        same_run(other, runs[0])


@NEEDS_CUDA
@pytest.mark.slow
@pytest.mark.parametrize("bits", ["", "nf4"])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_compiled_layers_are_recorded(
    kind: str, repeated: bool, bits: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = run(model_of(kind, "cuda", bits=bits), "cuda", graphs=False)
    torch.compiler.reset()
    model = model_of(kind, "cuda", bits=bits)
    model.compile()
    model.repeat_layers(repeated)
    compiled = run(model, "cuda", graphs=True)
    assert "without a CUDA graph" not in caplog.text
    for ours, expected in zip(compiled, plain):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


@NEEDS_CUDA
@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_an_odd_vocabulary_in_16_bits(kind: str) -> None:
    """Filled up to eights for fast products: the loss of all logits, within what bfloat16 rounds."""
    config = copy.deepcopy(CONFIGS[kind])
    config.vocab_size = VOCABULARY + 1
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).bfloat16().cuda()
    model = TwoLevelModel(base, AdapterSpec(rank=4, client_rank=2))
    names = [str(k) for k in range(CLIENTS)]
    x, y = (t.cuda().requires_grad_() for t in model.initial(0, names))
    batch = ROWS.to(torch.device("cuda")).batch(CLIENTS, np.arange(ROWS.starts[-1]))
    found = []
    for layer in (model.output_layer, None):
        assert layer is None or layer.in_eights()[0].shape[0] == VOCABULARY + 8
        model.output_layer = layer
        loss = TASK.loss(model, x, y, batch)
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), x)[0]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=0)
    assert (found[0][1] - found[1][1]).norm() < 0.05 * found[1][1].norm()


def peak(repeated: bool, logits: bool) -> int:
    """The most bytes that a step's gradient takes on the device."""
    model = model_of("llama", "cuda", torch.bfloat16)
    model.repeat_layers(repeated)
    if logits:
        model.output_layer = None
    names = [str(k) for k in range(CLIENTS)]
    x, y = (t.cuda() for t in model.initial(0, names))
    source = EncodedSource(ROWS.to(torch.device("cuda")), names, 9, seeds=(0,))
    batch = source.draw(range(CLIENTS), [0] * CLIENTS)
    method = PF2LoRA(model.common_layout, client_lr=0.1, batches=2)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    PlainStepper(partial(TASK.loss, model))(method, method.init(x, y), [batch, batch])
    return torch.cuda.max_memory_allocated() - before


@NEEDS_CUDA
def test_both_ways_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from pf2lora.adapters import output_layer

    monkeypatch.setattr(output_layer, "MOST_LOGITS", 64 * VOCABULARY)
    peak(False, True)  # libraries set up their workspaces
    all_logits, at_targets, run_again = peak(False, True), peak(False, False), peak(True, False)
    assert at_targets < 0.8 * all_logits and run_again < 0.8 * at_targets


@NEEDS_CUDA
def test_a_recording_keeps_no_more_than_a_plain_step_takes() -> None:
    """The layers' activations of a recorded step that runs them again are not all held in the graph's memory."""
    held = []
    for repeated in (False, False, True):  # first, libraries set up their workspaces
        model = model_of("llama", "cuda", torch.bfloat16)
        model.repeat_layers(repeated)
        names = [str(k) for k in range(CLIENTS)]
        x, y = (t.cuda() for t in model.initial(0, names))
        source = EncodedSource(ROWS.to(torch.device("cuda")), names, 9, seeds=(0,))
        batch = source.draw(range(CLIENTS), [0] * CLIENTS)
        method = PF2LoRA(model.common_layout, client_lr=0.1)
        stepper = GraphStepper(partial(TASK.loss, model))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        stepper(method, method.init(x, y), [batch, batch])
        assert not stepper.plain
        held.append(torch.cuda.max_memory_allocated())
    assert held[2] < held[1]
