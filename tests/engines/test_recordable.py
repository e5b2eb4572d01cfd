"""Whether the steps of every kind could be recorded as CUDA graphs, without CUDA (`helpers/recordable.py`)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from recordable import DEVICE, as_recorded, attending, obstacles, there
from test_memory_paths import CLIENTS, PROMPTS, TASK, model_of
from test_memory_paths import CONFIGS as LANGUAGE_MODELS
from tiny import CONFIGS, Problem, tiny_problem

from pf2lora.core.method import gradients, variable
from pf2lora.engines.batches import Batch, EncodedSource
from pf2lora.tasks.generation.task import Generation

EVERY_KIND = pytest.mark.parametrize("kind", CONFIGS)
BOTH_ATTENTIONS = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def padded_and_full(p: Problem) -> list[Batch]:
    padded = p.source.draw([0, 1, 2], [0, 0, 0])
    return [padded, replace(padded, full=True)]


def on_stand_in(p: Problem) -> Problem:
    """The problem's model and adapters on the device that stands for CUDA."""
    assert p.model is not None
    p.model.model.to(DEVICE)  # type: ignore[arg-type]
    return p._replace(x=p.x.to(DEVICE), y=p.y.to(DEVICE))


@pytest.mark.no_cover
@EVERY_KIND
@BOTH_ATTENTIONS
def test_a_step_of_every_kind_could_be_recorded(kind: str, attention: str) -> None:
    """It copies nothing between host and device and asks the device nothing. The meta device stands for it."""
    p = on_stand_in(tiny_problem(kind, model=attending(kind, attention, torch.float32)))
    x, y, batches = variable(p.x.float()), variable(p.y.float()), [there(b) for b in padded_and_full(p)]
    assert obstacles(lambda: [gradients(p.F(x, y, batch), x, y) for batch in batches]) == []


@pytest.mark.usefixtures("softmax_in_float64")
@EVERY_KIND
@BOTH_ATTENTIONS
def test_a_pass_that_is_recorded_has_the_plain_numbers(kind: str, attention: str) -> None:
    """transformers makes its masks in another way while a stream is recorded."""
    p = tiny_problem(kind, model=attending(kind, attention, torch.float64))
    for batch in padded_and_full(p):
        plain = p.F(p.x, p.y, batch)
        with as_recorded():
            torch.testing.assert_close(p.F(p.x, p.y, batch), plain, rtol=0, atol=1e-11)


@pytest.mark.no_cover
@pytest.mark.parametrize(("kind", "packing"), [("llama", False), *((kind, True) for kind in LANGUAGE_MODELS)])
def test_a_step_of_every_language_model_could_be_recorded(kind: str, packing: bool) -> None:
    """With the loss at targets alone, on the meta device (`recordable.py`)."""
    task = Generation(TASK.tokenizer, replace(TASK.settings, packing=packing))
    model = model_of(kind, "meta")
    names = [str(k) for k in range(CLIENTS)]
    source = EncodedSource(task.encode(PROMPTS, training=True), names, 2, seeds=(0,))
    batch = there(source.draw(range(CLIENTS), [0] * CLIENTS))
    assert ("example" in batch.tensors) is packing
    x, y = (variable(t.to(DEVICE)) for t in model.initial(0, names))
    assert obstacles(lambda: gradients(task.loss(model, x, y, batch), x, y)) == []


@pytest.mark.parametrize(
    ("asks", "named"),
    [
        (lambda u: u * torch.tensor([2.0], device=u.device), "tensor at `.*tensor\\(\\[2"),
        (lambda u: u + torch.zeros(1).to(u.device), "_to_copy.* at `.*zeros\\(1"),
    ],
)
def test_what_stands_in_the_way_is_found(asks: Any, named: str) -> None:
    p = on_stand_in(tiny_problem("roberta"))
    assert p.model is not None
    encoder = p.model.model.get_submodule("roberta.encoder")
    encoder.register_forward_pre_hook(lambda module, args: (asks(args[0]), *args[1:]))
    batch = there(p.source.draw([0, 1, 2], [0, 0, 0]))
    (found,) = obstacles(lambda: p.F(p.x, p.y, batch))
    assert re.search(named, found)
