"""The loss at targets alone, chunk by chunk, is that of all logits; and nothing as large as these is ever made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language_models import (
    CLIENTS,
    CONFIGS,
    ROWS,
    TASK,
    VOCABULARY,
    loss_and_gradients,
    two_level,
    whole,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from pf2lora.adapters import output_layer
from pf2lora.adapters.output_layer import OutputLayer, chunks, losses_of, target_losses
from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.second_order import differentiable_twice
from pf2lora.engines.batches import EncodedSource
from pf2lora.engines.stepper import signature
from pf2lora.methods.pf2lora import PF2LoRA


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, of which the last is not full."""
    monkeypatch.setattr(output_layer, "MOST_LOGITS", 24 * VOCABULARY)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_is_that_of_all_logits(kind: str, few_at_once: None) -> None:
    """In float64, of several clients in one pass, with their gradients. What a norm makes in float32 on the way back
    is the same in both up to what it rounds."""
    model, x, y = two_level(kind)
    batch = whole()
    assert batch.targets is not None and batch.targets < batch.tensors["input_ids"].numel()
    found = loss_and_gradients(model, x, y, batch)
    every = loss_and_gradients(model, x, y, replace(batch, targets=None))
    model.output_layer = None
    expected = loss_and_gradients(model, x, y, batch)
    exact = kind in ("gpt2", "phi")
    for at_targets, at_all, full in zip(found, every, expected):
        torch.testing.assert_close(
            at_targets, full, rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-7
        )
        torch.testing.assert_close(at_all, full, rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-7)


def test_the_models_of_the_readme_have_it() -> None:
    for kind in ("gpt2", "llama", "qwen2", "mistral", "gemma", "gemma2"):
        assert two_level(kind)[0].output_layer is not None
    adapted = TwoLevelModel(
        AutoModelForCausalLM.from_config(CONFIGS["llama"]), AdapterSpec(targets=("q_proj", "lm_head"))
    )
    assert adapted.output_layer is None  # its logits are every client's own


@pytest.mark.parametrize("layer_of", ["plain", "bias", "softcap"])
def test_gradients_by_hidden_states(layer_of: str, few_at_once: None) -> None:
    """Of weighed losses, against autograd of the definition; targets of probability near 0 and near 1."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    weight = normal(VOCABULARY, 8)
    bias = normal(VOCABULARY) if layer_of == "bias" else None
    layer = OutputLayer(weight, bias, 2.5 if layer_of == "softcap" else None)
    hidden = (3 * normal(70, 8)).requires_grad_()
    wanted = torch.randint(VOCABULARY, (70,), generator=random)
    wanted[::2] = layer.logits(hidden[::2]).argmax(-1)
    weights = normal(70)
    found = losses_of(layer, hidden, wanted, torch.float64)
    expected = cross_entropy(layer.logits(hidden), wanted, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((t * weights).sum(), hidden)[0] for t in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layer_of", ["plain", "bias", "softcap"])
def test_words_that_only_fill_up_change_nothing(layer_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device in 16 bits, whose products want eights: here by hand, in float64."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(53, 8, generator=random, dtype=torch.float64)
    bias = torch.randn(53, generator=random, dtype=torch.float64) if layer_of == "bias" else None
    softcap = 2.5 if layer_of == "softcap" else None
    hidden = torch.randn(20, 8, generator=random, dtype=torch.float64).requires_grad_()
    wanted = torch.randint(53, (20,), generator=random)
    found = []
    for fill in (0, 3):
        monkeypatch.setattr(output_layer, "aligned", lambda t, dim, fill=fill: pad(t, (0, 0, 0, fill)))
        layer = OutputLayer(weight, bias, softcap)
        losses = losses_of(layer, hidden, wanted, torch.float64)
        assert layer.filled is not None and len(layer.filled) == 53 + fill
        found.append((losses, torch.autograd.grad(losses.sum(), hidden)[0]))
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)


def test_in_bfloat16_it_is_no_further_from_the_truth_than_all_logits_are(few_at_once: None) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, 64, generator=random).bfloat16()
    states = (0.3 * torch.randn(64, 64, generator=random)).bfloat16()
    wanted = torch.randint(VOCABULARY, (64,), generator=random)
    wanted[::2] = (states[::2] @ weight.mT).argmax(-1)

    def gradient(weight: Tensor, states: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        hidden = states.clone().requires_grad_()
        return torch.autograd.grad(loss(OutputLayer(weight), hidden, wanted).mean(), hidden)[0].double()

    def plain(layer: OutputLayer, hidden: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(layer.logits(hidden).float(), wanted, reduction="none")

    def chunked(layer: OutputLayer, hidden: Tensor, wanted: Tensor) -> Tensor:
        return losses_of(layer, hidden, wanted, torch.promote_types(hidden.dtype, torch.float32))

    truth = gradient(weight.double(), states.double(), chunked)
    ours = gradient(weight, states, chunked)
    theirs = gradient(weight, states, plain)
    assert (ours - truth).norm() <= 1.05 * (theirs - truth).norm() < 0.02 * truth.norm()


def test_more_targets_than_said_are_refused() -> None:
    layer = OutputLayer(torch.eye(4))
    hidden, following = torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.long)
    assert target_losses(layer, hidden, following, torch.tensor([[0.0, 1.0, 0.0]]), 1).count_nonzero() == 1
    with pytest.raises(ValueError, match="2 positions have a target"):
        target_losses(layer, hidden, following, torch.tensor([[1.0, 1.0, 0.0]]), 1)


class LargestTensor(TorchDispatchMode):
    """The most numbers that any operation's result has."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]
        self.largest = max([self.largest, *(t.numel() for t in made)])
        return out


def test_no_tensor_is_as_large_as_the_logits_at_targets(few_at_once: None) -> None:
    """In a gradient and in an evaluation. All logits are, so the count can fail."""
    model, x, y = two_level("llama")
    batch = whole()
    targets = int(TASK.token_losses(model, x, y, batch)[1].sum())
    for ours, run in [
        (True, lambda: loss_and_gradients(model, x, y, batch)),
        (True, lambda: TASK.losses(model, x.detach(), y.detach(), ROWS, range(CLIENTS))),
        (False, lambda: loss_and_gradients(model, x, y, batch)),
    ]:
        if not ours:
            model.output_layer = None
        with LargestTensor() as count:
            run()
        assert (count.largest < targets * VOCABULARY / 2) is ours
        assert (count.largest >= batch.tensors["input_ids"].numel() * VOCABULARY) is not ours


def test_twice_differentiable_passes_have_a_second_derivative() -> None:
    model, x, y = two_level("gpt2")
    with differentiable_twice():
        loss = TASK.loss(model, x, y, whole())
        (first,) = torch.autograd.grad(loss.sum(), y, create_graph=True)
    (mixed,) = torch.autograd.grad(first.square().sum(), x)
    assert mixed.norm() > 0
    step = 1e-6 * mixed / mixed.norm()
    ends = []
    for moved in (x + step, x - step):
        at = moved.detach()
        (g,) = torch.autograd.grad(TASK.loss(model, at, y, whole()).sum(), y)
        ends.append(g.square().sum())
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-6, mixed.norm(), rtol=1e-5, atol=0)


def test_evaluation_has_the_same_losses() -> None:
    model, x, y = two_level("gemma2")
    ours = TASK.predict(model, x.detach(), y.detach(), ROWS)
    model.output_layer = None
    for own, full in zip(ours, TASK.predict(model, x.detach(), y.detach(), ROWS)):
        assert [c.tokens for c in own] == [c.tokens for c in full]
        assert [c.loss for c in own] == pytest.approx([c.loss for c in full], rel=1e-12)


def test_targets_are_known_beforehand_and_few_shapes_follow() -> None:
    """The host's count bounds the device's, a step's batches have one, and it is part of what is recorded."""
    source = EncodedSource(ROWS, [str(k) for k in range(CLIENTS)], 2, (0,), alike=2)
    model, x, y = two_level("gpt2")
    state = PF2LoRA(model.common_layout).init(x, y)
    for number in range(0, 8, 2):
        pair = [source.draw(range(CLIENTS), [n] * CLIENTS) for n in (number, number + 1)]
        assert pair[0].targets == pair[1].targets
        for batch in pair:
            counted = TASK.token_losses(model, x, y, batch)[1]
            assert batch.targets is not None and counted.sum() <= batch.targets <= counted.numel()
            assert batch.spread(1).targets == batch.targets
    other = [replace(batch, targets=1) for batch in pair]
    assert signature(state, pair) != signature(state, other)
    assert np.array_equal(ROWS.pooled().targets, ROWS.targets)  # type: ignore[arg-type]


def test_chunks_cover_every_position_once(few_at_once: None) -> None:
    for positions in (1, 8, 24, 25, 70):
        parts = chunks(positions, VOCABULARY)
        covered = [i for part in parts for i in range(positions)[part]]
        assert covered == list(range(positions))
        assert all(len(range(positions)[part]) <= 24 for part in parts)
