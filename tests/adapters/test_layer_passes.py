"""Layers that are run again for the gradient, and compiled ones: the plain passes' numbers, with less kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import LANGUAGE_MODELS
from tiny import CONFIGS, Problem, build, tiny_problem
from tiny_language_models import CLIENTS, ROWS, TASK, loss_and_gradients, two_level, whole
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pf2lora.adapters.layer_passes import stacked_layers
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.method import gradients, variable
from pf2lora.engines.local import Schedule, train


def model_of(p: Problem) -> TwoLevelModel:
    assert p.model is not None
    return p.model


def gradient(p: Problem) -> tuple[Tensor, ...]:
    x, y = variable(p.x), variable(p.y)
    loss = p.F(x, y, p.source.draw([0, 1, 2], [0] * 3))
    return loss.detach(), *gradients(loss, x, y)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_repeated_layers_give_the_same_numbers_to_the_last_bit(kind: str, dropout: float) -> None:
    """Of stacked clients, in every architecture; by themselves and again after a second pass."""
    p = tiny_problem(kind, dropout=dropout)
    plain = gradient(p)
    model_of(p).repeat_layers()
    for _ in range(2):
        for ours, expected in zip(gradient(p), plain):
            assert torch.equal(ours, expected)
    model_of(p).repeat_layers(False)
    assert all(
        "forward" not in layer.__dict__ for layer in stacked_layers(model_of(p).model, model_of(p).adapted)
    )


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_language_models_do_so_too(kind: str) -> None:
    model, x, y = two_level(kind)
    plain = loss_and_gradients(model, x, y, whole())
    model.repeat_layers()
    for ours, expected in zip(loss_and_gradients(model, x, y, whole()), plain):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("setting", ["pf2lora-exact", "pf2lora-difference", "homlora", "per-fedavg"])
def test_a_run_is_the_same(setting: str) -> None:
    """Exact second order, whose layers keep everything, among them."""
    ends = []
    for repeated in (False, True):
        p = tiny_problem("roberta")
        model_of(p).repeat_layers(repeated)
        method = build(setting, p)
        *_, last = train(method, p.F, method.init(p.x, p.y), p.source, Schedule(2, 2))
        ends.append(last.served.x)
    assert torch.equal(*ends)


def kept_numbers(p: Problem) -> int:
    """How many numbers a pass keeps for its gradient, each once."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, y = variable(p.x), variable(p.y)
    batch = p.source.draw([0, 1, 2], [0] * 3)
    frozen = {t.untyped_storage().data_ptr() for t in model_of(p).model.parameters()}
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = p.F(x, y, batch)  # noqa: F841  its graph keeps them alive, so that no place is used twice
    return sum(size for place, size in kept.items() if place not in frozen)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_repeated_layers_keep_less(kind: str) -> None:
    p = tiny_problem(kind, batch=12)
    plain = kept_numbers(p)
    model_of(p).repeat_layers()
    assert kept_numbers(p) < plain / 4


def test_evaluation_and_removal() -> None:
    """No gradient, nothing is run twice; and the base model's layers are as they were."""
    model, x, y = two_level("llama")
    layers, calls = stacked_layers(model.model, model.adapted), []
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    model.repeat_layers()
    with torch.no_grad():
        TASK.losses(model, x, y, ROWS, range(CLIENTS))
    assert len(calls) == len(layers)
    model.remove()
    assert all("forward" not in layer.__dict__ for layer in layers)


@pytest.mark.parametrize(
    ("kind", "repeated"),
    [("llama", True), pytest.param("llama", False, marks=pytest.mark.slow), ("gpt2", False)],
)
def test_compiled_layers(kind: str, repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's code serves all layers. By the compiler's front ends alone, which take no C++ compiler."""
    compile_ = torch.compile

    def with_front_ends(function: Any, **options: Any) -> Any:
        return compile_(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", with_front_ends)
    model, x, y = two_level(kind)
    plain = loss_and_gradients(model, x, y, whole())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile()
    if repeated:
        model.repeat_layers()
    for ours, expected in zip(loss_and_gradients(model, x, y, whole()), plain):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert (
        counters["stats"]["unique_graphs"] == 3
    )  # a layer, the first one, whose input is fixed, and the loss
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_only_passes_with_a_gradient_are_compiled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and texts come in shapes of their own, every token of a text with a longer cache: a layer of a language
    model, or a whole encoder, is run as it is."""
    calls: list[bool] = []

    def stand_in(function: Any, **options: Any) -> Any:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return function(*args, **kwargs)

        return compiled

    monkeypatch.setattr(torch, "compile", stand_in)
    if kind == "llama":
        model, x, y = two_level(kind)
        model.compile()
        TASK.losses(model, x, y, ROWS, range(CLIENTS))
        with model.bound(x[:1], y[:1]) as base, torch.no_grad():
            base.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)  # type: ignore[operator]
        assert not calls
        loss_and_gradients(model, x, y, whole())
        layers = [True] * len(stacked_layers(model.model, model.adapted))
        assert calls == [*layers, False]  # the loss, whose gradient is made in the forward pass
        return
    p = tiny_problem(kind)
    model_of(p).compile()
    with torch.no_grad():
        p.F(p.x, p.y, p.source.draw([0, 1, 2], [0] * 3))
    assert not calls
    gradient(p)
    assert calls == [True]


def test_a_run_of_many_lengths_is_compiled_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit torch would run passes as they are without a word."""
    limits = torch._dynamo.config
    with limits.patch(recompile_limit=8, accumulated_recompile_limit=256):
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        model_of(tiny_problem("roberta")).compile(1)
        assert limits.recompile_limit == 64
        model_of(tiny_problem("roberta")).compile(100)
        assert limits.recompile_limit == 400 <= limits.accumulated_recompile_limit
