"""Packed rows: the losses and gradients of examples by themselves, in fewer rows, for every architecture."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from language_models import IN_FLOAT32, LANGUAGE_MODELS, adapted_model
from stand_in_graphs import stepper_of
from tokenizers_for_tests import byte_level

from pf2lora.adapters.architectures import packed_mask
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch, Encoded, EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.tasks.generation.packing import best_fit, pack
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation, check_packing
from pf2lora.tasks.generation.tokens import Tokens

TEXTS = [
    "The pizza place is near the river.",
    "Noodles and tapas, of an evening.",
    "Yes.",
    "There is no such thing.",
]
TOKENIZER = byte_level(TEXTS * 20)
NAMES = ["one", "two"]
CLIENTS = [
    [PromptRow(text[: 3 + 4 * i], (text, "Yes.")) for i, text in enumerate(TEXTS)],
    [PromptRow("fish", ("It is near.",)), PromptRow("soup and rice", tuple(TEXTS[:2]))],
]


def encoded(packing: bool, length: int = 48) -> tuple[Generation, Encoded]:
    task = Generation(TOKENIZER, GenerationSettings(max_length=length, max_new_tokens=0, packing=packing))
    return task, task.encode(CLIENTS, training=True)


def whole(data: Encoded, k: int) -> Batch:
    return data.batch(1, np.arange(data.starts[k], data.starts[k + 1]))


def attend(model: TwoLevelModel, attention: str) -> None:
    if attention == "sdpa" and not model.model._supports_sdpa:
        pytest.skip(f"{model.model.config.model_type} has no fused attention")
    model.model.set_attn_implementation(attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_packed_rows_have_the_loss_and_the_gradient_of_their_examples(kind: str, attention: str) -> None:
    """In float64, each client's mean over its target tokens, by x and by y."""
    model, x, y = adapted_model(kind, 2)
    attend(model, attention)
    found: list[list[torch.Tensor]] = []
    for packing in (False, True):
        task, data = encoded(packing)
        parts: list[torch.Tensor] = []
        for k in range(2):
            loss = task.loss(model, x[k : k + 1], y[k : k + 1], whole(data, k))
            parts += [loss.detach(), *torch.autograd.grad(loss.sum(), (x, y))]
        found.append(parts)
    exact = kind not in IN_FLOAT32 and (kind, attention) != ("phi", "eager")  # its softmax is in float32
    for alone, together in zip(*found):
        torch.testing.assert_close(
            together, alone, rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-6
        )


def test_clients_share_a_pass_of_packed_rows() -> None:
    """The engine's stacked batches: each client's loss is what it is alone."""
    model, x, y = adapted_model("gpt2", 2)
    task, data = encoded(packing=True)
    source = EncodedSource(data, NAMES, 2, (0,))
    together = task.loss(model, x, y, source.draw([0, 1], [3, 3]))
    for k in range(2):
        alone = task.loss(model, x[k : k + 1], y[k : k + 1], source.draw([k], [3]))
        torch.testing.assert_close(together[k : k + 1], alone, rtol=1e-12, atol=0)


def test_nothing_of_an_example_reaches_another() -> None:
    model, x, y = adapted_model("llama", 2)
    task, data = encoded(packing=True)
    batch = whole(data, 0)
    losses, _ = task.token_losses(model, x[:1], y[:1], batch)
    second = batch.tensors["example"] == 2
    assert second.any()
    changed = batch.tensors | {"input_ids": torch.where(second, 5, batch.tensors["input_ids"])}
    other, _ = task.token_losses(model, x[:1], y[:1], Batch(1, changed, targets=batch.targets))
    torch.testing.assert_close(other[~second], losses[~second], rtol=1e-6, atol=1e-9)
    assert (other[second] != losses[second]).any()


def test_the_mask_by_hand() -> None:
    mask = packed_mask(torch.tensor([[1, 1, 2, 2, 0]]), torch.float64)
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert mask.shape == (1, 1, 5, 5)
    assert torch.equal(mask[0, 0] == 0, torch.tensor(seen).bool())


def test_rows_are_filled_and_hold_every_example_once() -> None:
    lengths = [7, 3, 5, 5, 2, 8, 1, 4]
    rows = best_fit(lengths, 10)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 10 for row in rows) and len(rows) == 4
    assert rows == best_fit(lengths, 10) == sorted(rows)
    columns, sizes = pack([[Tokens([5, 6, 7], [1, 0, 1]), Tokens([8, 9], [0, 1])], [Tokens([4], [0])]], 8)
    assert sizes == [1, 1]
    assert columns == {
        "input_ids": [[5, 6, 7, 8, 9], [4]],
        "target": [[0, 0, 1, 0, 1], [0]],
        "example": [[1, 1, 1, 2, 2], [1]],
        "position": [[0, 1, 2, 0, 1], [0]],
    }


def test_a_client_counts_by_its_examples_and_what_is_packed_is_said() -> None:
    task, data = encoded(packing=True, length=96)
    assert sum(data.sizes()) < 11 and EncodedSource(data, NAMES, 2, (0,)).sizes == [8, 3]
    assert EncodedSource(data.pooled(), ["all"], 2, (0,)).sizes == [11]
    assert task.notes == [
        f"11 training examples are packed into {sum(data.sizes())} rows of at most 96 tokens, of which --batch-size "
        f"counts (the fewest of a client: {min(data.sizes())})"
    ]
    assert task.encode(CLIENTS, training=False).sizes() == [8, 3]  # tests are not packed


def test_models_that_cannot_be_packed_for() -> None:
    class Other:
        config = type("Config", (), {"model_type": "mamba"})

    with pytest.raises(
        UserError, match=r"--packing does not know models of the kind 'mamba' \(known: gpt2, llama"
    ):
        check_packing(Other())  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_packed_steps_are_recorded(kind: str, attention: str, caplog: pytest.LogCaptureFixture) -> None:
    """No step falls back to the plain way, and the numbers are the plain ones'."""
    device, ends = torch.device("cuda"), []
    for graphs in (False, True):
        model, x, y = adapted_model(kind, 2, torch.float32)
        attend(model, attention)
        model.model.to(device)  # type: ignore[arg-type]
        task, data = encoded(packing=True)
        method: Any = PF2LoRA(model.common_layout, client_lr=1e-3)
        source = EncodedSource(data.to(device), NAMES, 2, (0,), alike=method.draws)
        state = method.init(x.detach(), y.detach())
        F = partial(task.loss, model)
        how = stepper_of(F, graphs)
        *_, last = train(method, F, state, source, Schedule(2, 3), device=device, stepper=how)
        ends.append(last.served.x.cpu())
    assert "without a CUDA graph" not in caplog.text
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-4)
