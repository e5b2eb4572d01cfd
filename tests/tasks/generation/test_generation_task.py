"""Generation: the loss is on the target alone, padding does not matter, and clients generate together or apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_text_models import CAUSAL as CONFIGS
from tiny_text_models import causal
from tokenizers_for_tests import byte_level
from torch import Tensor
from transformers import (
    NoRepeatNGramLogitsProcessor,
)

from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.adapters.layers import Adapted
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.engines.batches import Batch, Encoded, EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.tasks.generation import scores as nlg
from pf2lora.tasks.generation.decoding import NoRepeatInText, left_padded
from pf2lora.tasks.generation.encoding import PromptExamples
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation, beam_bytes

FOODS = ("pizza", "noodles", "fish and chips", "tapas")
TEXTS = [f"The {food} place is near the river." for food in FOODS]
TOKENIZER = byte_level(TEXTS * 20)
EVERY_LAYER = {
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "llama": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
KINDS = pytest.mark.parametrize("kind", list(CONFIGS))


def two_level(kind: str, clients: int, size: float = 0.5) -> tuple[TwoLevelModel, Tensor, Tensor]:
    """A model and adapters that are different, and far from zero, for every client."""
    model = TwoLevelModel(causal(kind), AdapterSpec(rank=4, client_rank=2))
    torch.manual_seed(1)
    x = torch.randn(clients, model.common_layout.size, dtype=torch.float64) * size
    y = torch.randn(clients, model.personal_layout.size, dtype=torch.float64) * size
    return model, x, y


def task(generation_batch: int = 3, **settings: Any) -> Generation:
    given: dict[str, Any] = {"max_length": 64, "max_new_tokens": 12}
    return Generation(TOKENIZER, GenerationSettings(**given | settings), generation_batch=generation_batch)


def rows(*prompts: str, targets: Sequence[str] = ("It is near the river.",)) -> list[PromptRow]:
    return [PromptRow(prompt, tuple(targets)) for prompt in prompts]


def whole(encoded: Encoded, clients: int) -> Batch:
    """All rows of clients of equal size as one batch."""
    return Batch(clients, encoded.rows(np.arange(encoded.starts[-1])))


def test_example_is_prompt_separator_target_end() -> None:
    encoded = task().encode([rows("name : pizza")], training=True)
    ids = encoded.token_columns["input_ids"][0, : encoded.lengths[0]].tolist()
    end = TOKENIZER.eos_token_id
    prompt, target = TOKENIZER("name : pizza")["input_ids"], TOKENIZER(" It is near the river.")["input_ids"]
    assert ids == [*prompt, end, *target, end]
    assert encoded.token_columns["target"][0].tolist() == [0] * (len(prompt) + 1) + [1] * (len(target) + 1)
    joined = task(separator="").encode([rows("name : pizza")], training=True)
    assert joined.token_columns["input_ids"][0, : joined.lengths[0]].tolist() == [*prompt, *target, end]


@KINDS
def test_loss_is_the_mean_over_target_tokens(kind: str) -> None:
    """Against the definition, token by token, on unpadded rows of a plain model."""
    generation, (model, x, y) = task(), two_level(kind, 2)
    clients = [rows("pizza", "a"), rows("noodles and tapas", "fish", targets=("Yes it is.",))]
    encoded = generation.encode(clients, training=True)
    found = generation.loss(model, x, y, whole(encoded, 2))
    for k, client in enumerate(clients):
        total, count = 0.0, 0
        for i in range(len(client)):
            at = encoded.starts[k] + i
            ids = encoded.token_columns["input_ids"][at : at + 1, : encoded.lengths[at]].long()
            logits = model(x[k : k + 1], y[k : k + 1], input_ids=ids).logits
            for t in encoded.token_columns["target"][at].nonzero().flatten().tolist():
                total -= float(logits[0, t - 1].log_softmax(-1)[ids[0, t]])
                count += 1
        assert found[k].item() == pytest.approx(total / count, rel=1e-12)


def test_loss_ignores_the_prompt_tokens_as_targets_and_the_padding() -> None:
    generation, (model, x, y) = task(), two_level("gpt2", 1)
    batch = whole(generation.encode([rows("pizza", "noodles and tapas")], training=True), 1)
    before = generation.loss(model, x, y, batch)
    padding = batch.tensors["attention_mask"] == 0
    assert padding.any()
    other = batch.tensors | {"input_ids": torch.where(padding, 7, batch.tensors["input_ids"])}
    torch.testing.assert_close(generation.loss(model, x, y, Batch(1, other)), before, rtol=1e-12, atol=0)
    losses, counted = generation.token_losses(model, x, y, batch)
    targets = [len(TOKENIZER(" It is near the river.")["input_ids"]) + 1] * 2
    assert counted.sum(1).tolist() == targets
    assert not losses[~counted].any()


def test_left_padded() -> None:
    ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    moved, where = left_padded(ids, mask, pad=9)
    assert moved.tolist() == [[5, 6, 7], [9, 9, 8]]
    assert where.tolist() == [[1, 1, 1], [0, 0, 1]]


@KINDS
@pytest.mark.parametrize(
    "decoding",
    [
        {"beams": 1, "no_repeat_ngram": 0},
        {"beams": 4},
        {"beams": 3, "length_penalty": 2.0, "no_repeat_ngram": 2},
    ],
    ids=["greedy", "beam", "beam-bigrams"],
)
def test_clients_together_generate_what_each_generates_alone(kind: str, decoding: dict[str, Any]) -> None:
    model, x, y = two_level(kind, 3)
    prompts = [
        ["pizza", "a longer prompt about noodles", "tapas"],
        ["fish and chips"],
        ["b", "the river place is"],
    ]
    together = task(**decoding).generate(model, x, y, prompts)
    for k, own in enumerate(prompts):
        one_by_one = [
            task(generation_batch=1, **decoding).generate(model, x[k : k + 1], y[k : k + 1], [[p]])[0][0]
            for p in own
        ]
        assert together[k] == one_by_one
    swapped = task(**decoding).generate(
        model, x[[1, 0, 2]], y[[1, 0, 2]], [prompts[0], prompts[1], prompts[2]]
    )
    assert swapped[0] != together[0]  # a client's adapters matter


def test_where_memory_ends_fewer_beams_are_followed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory for five sequences: one prompt of four beams. What is trained or answered has room of its own."""
    model, x, y = two_level("gpt2", 3)
    prompts = [["pizza", "a longer prompt about noodles", "tapas"], ["fish and chips"], ["b", "the river"]]
    expected = task(beams=4).generate(model, x, y, prompts)
    forward = Adapted.forward

    def bounded(self: Adapted, u: Tensor) -> Tensor:
        if len(u) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, u)

    monkeypatch.setattr(Adapted, "forward", bounded)
    ours = task(beams=4)
    assert ours.generate(model, x, y, prompts) == expected
    assert [r.getMessage().split(": from")[0] for r in caplog.records if r.name == "pf2lora"] == [
        "out of memory with 3 clients in a writing pass",
        "out of memory with 3 rows of a client in a writing pass",
    ]
    assert (ours.rooms.writing.clients, ours.rooms.writing.rows) == (1, 1)
    assert (ours.rooms.answering.clients, ours.rooms.training.clients) == (None, None)


def test_room_to_write_is_counted_in_beams() -> None:
    """Of clients × prompts × beams sequences, each with a key and a value of every layer for every token."""
    model, _, _ = two_level("llama", 3)
    config = model.model.config
    encoded = task().encode([rows("pizza", "noodles")] * 3, training=False)
    assert isinstance(encoded, PromptExamples)
    tokens = int(encoded.prompts.lengths.max()) + 12
    width = config.num_key_value_heads * config.head_dim
    cache = tokens * 2 * config.num_hidden_layers * width * 8
    beam = beam_bytes(model.model, tokens)
    assert beam >= cache and beam_bytes(model.model, 2 * tokens) - beam == 2 * cache
    for memory, room in ((4 * 3 * 2.5 * beam, (2, None)), (4 * 2.5 * beam, (1, 2)), (0, (1, 1))):
        ours = task(beams=4)
        ours.make_room_to_write(model, encoded, memory)
        assert (ours.rooms.writing.clients, ours.rooms.writing.rows) == room
    unwritten = task(max_new_tokens=0)
    unwritten.make_room_to_write(model, encoded, 0)
    assert unwritten.rooms.writing.clients is None


@KINDS
def test_greedy_generation_is_the_argmax_without_padding_or_cache(kind: str) -> None:
    model, x, y = two_level(kind, 2)
    decoding: dict[str, Any] = {"beams": 1, "no_repeat_ngram": 0, "max_new_tokens": 8}
    prompts = ["pizza", "a longer prompt about noodles"]
    found = task(**decoding).generate(model, x, y, [[p] for p in prompts])
    for k, prompt in enumerate(prompts):
        ids = [*TOKENIZER(prompt)["input_ids"], TOKENIZER.bos_token_id]
        start = len(ids)
        for _ in range(8):
            logits = model(x[k : k + 1], y[k : k + 1], input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == TOKENIZER.eos_token_id:
                break
        assert found[k][0] == str(TOKENIZER.decode(ids[start:], skip_special_tokens=True)).strip()


def test_no_repeat_ngram_counts_the_text_but_not_the_prompt() -> None:
    processor = NoRepeatInText(2, prompt_width=3)
    scores = torch.zeros(1, 10)
    prompt = [4, 5, 6]
    assert not processor(torch.tensor([[*prompt, 4]]), scores).isinf().any()  # 4 5 stands in the prompt only
    banned = processor(torch.tensor([[*prompt, 4, 5, 4]]), scores)
    assert banned.isinf().nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_repeat_ngram_is_transformers_rule(size: int) -> None:
    torch.manual_seed(0)
    for length in range(12):
        text, scores = torch.randint(0, 3, (50, length)), torch.randn(50, 5)
        expected = NoRepeatNGramLogitsProcessor(size)(text, scores.clone())
        prompt = torch.randint(0, 3, (50, 6))
        assert torch.equal(NoRepeatInText(size, 6)(torch.cat([prompt, text], 1), scores), expected)


def test_adapters_are_unbound_after_generation() -> None:
    model, x, y = two_level("gpt2", 2)
    task().generate(model, x, y, [["a"], ["b"]])
    assert all(not layer.factors for layer in model.adapted.values())
    with pytest.raises(RuntimeError, match="inside"), model.bound(x, y):
        raise RuntimeError("inside")
    assert all(not layer.factors for layer in model.adapted.values())


def bleu_alone(system: Sequence[str], references: nlg.References) -> nlg.Scores:
    """The text metric that needs no Java: the others are tested with the scorers."""
    return nlg.Scores({"BLEU": nlg.bleu(system, references)}, {"METEOR": "there is no Java here"})


@KINDS
def test_training_evaluation_and_generation_end_to_end(kind: str) -> None:
    """Two clients that answer the same prompts differently learn to: the common adapter alone could not."""
    generation = task(beams=2, max_new_tokens=16)
    generation.scorer = bleu_alone
    answers = ("Yes, it is near the river.", "No, there is no such place.")
    clients = [rows(*FOODS, targets=(answer,)) for answer in answers]
    encoded = generation.encode(clients, training=True)
    test = generation.encode(clients, training=False)
    model = TwoLevelModel(
        causal(kind, torch.float32), AdapterSpec(rank=8, client_rank=4, targets=EVERY_LAYER[kind])
    )
    x, y = model.initial(0, ["one", "two"])
    method = PF2LoRA(model.common_layout, lr=1e-2, client_lr=0.3, hypergradient_mode="difference")
    source = EncodedSource(encoded, ["one", "two"], 4, (0,))
    first = [generation.score(p, r) for p, r in zip(generation.predict(model, x, y, test), clients)]
    for done in train(method, partial(generation.loss, model), method.init(x, y), source, Schedule(12, 10)):
        last = done
    x, y = last.served.x, last.served.y
    predictions = generation.predict(model, x, y, test, final=True)
    for k in range(2):
        scores = generation.score(predictions[k], clients[k])
        loss, untrained = scores["loss"], first[k]["loss"]
        assert loss is not None and untrained is not None and loss < 0.2 * untrained
        assert scores["perplexity"] == pytest.approx(math.exp(loss))
        assert [p.text for p in predictions[k]] == [answers[k]] * len(FOODS)
        assert scores["BLEU"] == pytest.approx(1.0)
        assert scores["METEOR"] is None and list(scores) == list(generation.metrics)
    assert "no METEOR: there is no Java here" in generation.notes
    example = generation.example(predictions[0][0], clients[0][0])
    assert example is not None and example.output == answers[0] and example.references == (answers[0],)


def test_during_a_run_nothing_is_generated() -> None:
    generation, (model, x, y) = task(), two_level("gpt2", 1)
    data = [rows("pizza", targets=("Near the river.", "By the river, it is."))]
    predictions = generation.predict(model, x, y, generation.encode(data, training=False))
    scores = generation.score(predictions[0], data[0])
    assert list(scores) == ["loss", "perplexity"]
    assert generation.example(predictions[0][0], data[0][0]) is None
    batch = whole(generation.encode(data, training=True), 1)  # both targets count, token by token
    assert scores["loss"] == pytest.approx(generation.loss(model, x, y, batch).item(), rel=1e-9)


def test_long_rows_are_counted() -> None:
    generation = task(max_length=24)
    long = "noodles " * 40
    data = [rows("pizza", long, targets=("The river. " * 30, "Yes."))]
    encoded = generation.encode(data, training=True)
    assert encoded.sizes() == [2]
    assert max(encoded.lengths) == 24
    prompt, target = (len(TOKENIZER(t)["input_ids"]) + 1 for t in ("pizza", " " + "The river. " * 30))
    assert generation.notes == [
        "1 of 2 training prompts fill the window of 24 tokens (max_length): they are left out of training",
        "1 training targets are cut to fit the window of 24 tokens (max_length): "
        f"{prompt + target - 24} of their tokens are lost",
    ]
    model, x, y = two_level("gpt2", 1)
    found = generation.predict(model, x, y, generation.encode(data, training=False), final=True)
    assert [p.tokens > 0 for p in found[0]] == [True, False]
    assert all(p.text is not None for p in found[0])
    with pytest.raises(UserError, match="client number 2 fill the window of 24 tokens"):
        generation.encode([rows("pizza"), rows(long)], training=True)
    with pytest.raises(UserError, match="fills the window of 24"):
        generation.generate(model, x, y, [[long]])


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an empty target"):
        task().encode([[PromptRow("a", (" ",))]], training=True)
    with pytest.raises(UserError, match=r"kind of scores 'e3e'; did you mean 'e2e'\?"):
        task(scores="e3e")
    with pytest.raises(UserError, match="beams is 0"):
        GenerationSettings(beams=0)
    causal("gpt2").save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="90 and max_new_tokens 12 are 102 tokens, but the model takes 96"):
        task(max_length=90).load_model(str(tmp_path), torch.float32)


def test_a_tokenizer_without_padding_token(tmp_path: Path) -> None:
    assert TOKENIZER.pad_token is None
    TOKENIZER.save_pretrained(tmp_path)
    causal("gpt2", torch.float32).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    generation = Generation(tokenizer, GenerationSettings(max_length=64, beams=2, max_new_tokens=6))
    model = TwoLevelModel(generation.load_model(str(tmp_path), torch.float32), AdapterSpec())
    x, y = model.initial(0, ["one"])
    data = [rows("pizza", "noodles and fish")]
    loss = generation.loss(model, x, y, whole(generation.encode(data, training=True), 1))
    assert torch.isfinite(loss).all()
    assert len(generation.generate(model, x, y, [["pizza", "noodles and fish"]])[0]) == 2
