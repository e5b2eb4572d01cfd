"""Question answering: windows cover the context, spans are the best there are, and answers come from the text."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_text_models import READERS as CONFIGS
from tiny_text_models import TEXTS, TOKENIZER, WORDS, reader
from tokenizers_for_tests import byte_level
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
)

from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.engines.batches import Batch, EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.tasks.base import Example
from pf2lora.tasks.question_answering.rows import QuestionRow
from pf2lora.tasks.question_answering.settings import QuestionAnsweringSettings
from pf2lora.tasks.question_answering.task import (
    Answer,
    QuestionAnswering,
    WindowExamples,
    best_spans,
    window_losses,
)

KINDS = pytest.mark.parametrize("kind", list(CONFIGS))


def task(
    tokenizer: PreTrainedTokenizerFast = TOKENIZER, no_answers: bool = False, **settings: Any
) -> QuestionAnswering:
    given: dict[str, Any] = {"max_length": 40, "stride": 8, "n_best": 5, "max_answer_tokens": 6}
    return QuestionAnswering(tokenizer, QuestionAnsweringSettings(**given | settings), no_answers=no_answers)


def row(
    context: str, answer: str, question: str = "Where is the key?", start: int | None = None
) -> QuestionRow:
    at = context.index(answer) if start is None else start
    return QuestionRow("q", context, question, (answer,) if answer else (), (at,) if answer else ())


def random_row(random: np.random.Generator, words: int) -> QuestionRow:
    """A context of random words and odd separators, with a random span of it for the answer."""
    separators = [" ", "  ", "\n", ", ", " – ", "-"]
    context, spans = "", []
    for word in random.choice([*WORDS, "Ünïcödé", "«quoted»", "naïve"], words):
        spans.append((len(context), len(context) + len(word)))
        context += word + random.choice(separators)
    first = int(random.integers(words))
    last = min(words - 1, first + int(random.integers(3)))
    begin, end = spans[first][0], spans[last][1]
    return QuestionRow("q", context, "Where is the key?", (context[begin:end],), (begin,))


def windows_of(encoded: WindowExamples) -> list[dict[str, int]]:
    return [{n: int(c[i]) for n, c in encoded.row_columns.items()} for i in range(encoded.starts[-1])]


@pytest.mark.parametrize(
    "tokenizer", [TOKENIZER, byte_level(TEXTS, padding=True)], ids=["wordpiece", "bytes"]
)
def test_windows_cover_the_context_and_point_at_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    random = np.random.default_rng(0)
    clients = [[random_row(random, int(random.integers(1, 60))) for _ in range(n)] for n in (20, 10)]
    encoded = task(tokenizer).encode(clients, training=False)
    windows, everyone = windows_of(encoded), [r for client in clients for r in client]
    assert encoded.row_counts == (20, 10)
    seen: list[set[int]] = [set() for _ in everyone]
    found = [0] * len(everyone)
    for i, window in enumerate(windows):
        client = int(i >= encoded.starts[1])
        at = int(encoded.row_numbers[i]) + 20 * client
        question = everyone[at]
        assert encoded.lengths[i] <= 40
        places = encoded.offsets[i]
        for t in range(window["context_start"], window["context_end"]):
            seen[at].update(range(*places[t]))
        if window["start"] != window["cls"]:
            text = question.context[places[window["start"]][0] : places[window["end"]][1]]
            assert text.strip() == question.answers[0]
            found[at] += 1
        else:
            assert window["end"] == window["cls"] == 0
            covered = {
                c for t in range(window["context_start"], window["context_end"]) for c in range(*places[t])
            }
            begin = question.starts[0]
            assert not covered >= set(range(begin, begin + len(question.answers[0])))
    for question, covered, times in zip(everyone, seen, found):
        assert covered >= {i for i, c in enumerate(question.context) if not c.isspace()}
        assert times >= 1  # answers are shorter than the stride, so some window holds the whole of it
    assert any(times > 1 for times in found)
    sizes = [sum(encoded.row_numbers[: encoded.starts[1]] == k) for k in range(20)]
    assert max(sizes) > 1


def test_best_spans_are_the_best_of_all() -> None:
    """Against every pair of a start and an end."""
    torch.manual_seed(0)
    start, end = torch.randn(2, 9), torch.randn(2, 9)
    settings = QuestionAnsweringSettings(n_best=7, max_answer_tokens=3)
    bounds = {"context_start": torch.tensor([3, 5]), "context_end": torch.tensor([8, 6])}
    found = best_spans(start, end, Batch(1, bounds), settings)
    for i, (low, high) in enumerate([(3, 8), (5, 6)]):
        pairs = [
            (float(start[i, s] + end[i, e]), s, e)
            for s in range(low, high)
            for e in range(s, min(s + 3, high))
        ]
        expected = sorted(pairs, reverse=True)[:7]
        assert [span[1:] for span in found[i]] == [span[1:] for span in expected]
        assert [span[0] for span in found[i]] == pytest.approx([span[0] for span in expected])


class Oracle(QuestionAnswering):
    """A task whose model points at the answer in every window that holds it, and at [CLS] in the others."""

    def logits(self, model: object, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        shape = batch.tensors["input_ids"].shape
        start, end = torch.zeros(shape), torch.zeros(shape)
        at = torch.arange(shape[0])
        start[at, batch.tensors["start"]] += 5
        end[at, batch.tensors["end"]] += 5
        padding = batch.tensors["attention_mask"] == 0
        return start.masked_fill(padding, -torch.inf), end.masked_fill(padding, -torch.inf)


def oracle_answers(rows: list[QuestionRow], **options: Any) -> list[Answer]:
    settings = QuestionAnsweringSettings(max_length=40, stride=8, n_best=5)
    oracle = Oracle(TOKENIZER, settings, **options)
    nothing = torch.zeros(1, 0)
    return oracle.predict(None, nothing, nothing, oracle.encode([rows], training=False))[0]  # type: ignore[arg-type]


def test_a_perfect_model_answers_every_question_in_the_words_of_the_text() -> None:
    random = np.random.default_rng(1)
    rows = [random_row(random, int(random.integers(5, 80))) for _ in range(60)]
    answers = oracle_answers(rows)
    assert [answer.text for answer in answers] == [r.answers[0] for r in rows]
    assert max(answer.loss for answer in answers) < 1
    scores = task().score(answers, rows)
    assert scores["f1"] == scores["exact_match"] == 1.0


def test_no_answer_needs_every_window_to_say_so() -> None:
    long = " ".join(WORDS * 4)
    rows = [row(long, "", start=0), row(long, "saltbridge"), row("stone river", "")]
    answers = oracle_answers(rows, no_answers=True)
    assert [a.text for a in answers] == ["", "saltbridge", ""]
    assert answers[0].no_answer > 0.99 and answers[1].no_answer < 0.01
    assert all(a.n_best for a in answers)
    forced = oracle_answers(rows)  # where every question has an answer, one is always given
    assert all(a.text for a in forced)
    scores = task(no_answers=True).score(answers, rows)
    assert scores["unanswerable_f1"] == scores["answerable_f1"] == scores["exact_match"] == 1.0
    assert task(no_answers=True).score(answers[1:2], rows[1:2])["unanswerable_f1"] is None


def test_the_threshold_decides() -> None:
    question = row("stone river", "")
    for threshold, answered in ((0.0, False), (1.0, True)):
        settings = QuestionAnsweringSettings(max_length=40, stride=8, no_answer_threshold=threshold)
        oracle = Oracle(TOKENIZER, settings, no_answers=True)
        nothing = torch.zeros(1, 0)
        encoded = oracle.encode([[question]], training=False)
        (found,) = oracle.predict(None, nothing, nothing, encoded)[0]  # type: ignore[arg-type]
        assert bool(found.text) == answered


@KINDS
def test_loss_is_the_mean_over_windows_and_padding_does_not_matter(kind: str) -> None:
    answering = task()
    model = TwoLevelModel(reader(kind), AdapterSpec(rank=4, client_rank=2))
    torch.manual_seed(1)
    x = torch.randn(2, model.common_layout.size, dtype=torch.float64) * 0.3
    y = torch.randn(2, model.personal_layout.size, dtype=torch.float64) * 0.3
    clients = [
        [row("stone river cloud salt", "cloud"), row("salt", "salt")],
        [row("iron", "iron"), row("wood wood stonegate river iron", "iron")],
    ]
    encoded = answering.encode(clients, training=True)
    assert encoded.sizes() == [2, 2]
    batch = Batch(2, encoded.rows(np.arange(4)))
    together = answering.loss(model, x, y, batch)
    for k in range(2):
        alone = []
        for i in range(2):
            at = 2 * k + i
            one = encoded.rows(np.array([at]))
            width = int(encoded.lengths[at])
            cut = {name: t[:, :width] if t.dim() == 2 else t for name, t in one.items()}
            own = Batch(1, cut)
            start, end = answering.logits(model, x[k : k + 1], y[k : k + 1], own)
            first = -start[0].log_softmax(-1)[own.tensors["start"]]
            last = -end[0].log_softmax(-1)[own.tensors["end"]]
            alone.append(float((first + last) / 2))
        assert together[k].item() == pytest.approx(sum(alone) / 2, rel=1e-9)
    padding = batch.tensors["attention_mask"] == 0
    assert padding.any()
    other = batch.tensors | {"input_ids": torch.where(padding, 9, batch.tensors["input_ids"])}
    torch.testing.assert_close(answering.loss(model, x, y, Batch(2, other)), together, rtol=1e-9, atol=0)


@KINDS
def test_training_and_evaluation_end_to_end(kind: str) -> None:
    """Two clients whose answers stand elsewhere: after the word "stone", or after the word "iron"."""
    random = np.random.default_rng(0)
    fillers = ["river", "cloud", "wood", "salt"]
    clients = []
    for marker in ("stone", "iron"):
        rows = []
        for _ in range(40):
            words = list(random.choice(fillers, 8))
            words[1], words[5] = random.permutation(["stone", "iron"])
            at = words.index(marker)
            context = " ".join(words)
            begin = len(" ".join(words[: at + 1])) + 1
            rows.append(row(context, words[at + 1], start=begin))
        clients.append(rows)
    answering = task(max_length=44)
    model = TwoLevelModel(reader(kind, torch.float32), AdapterSpec(rank=8, client_rank=4))
    x, y = model.initial(0, ["one", "two"])
    encoded = answering.encode(clients, training=True)
    test = answering.encode(clients, training=False)
    method = PF2LoRA(model.common_layout, lr=5e-3, client_lr=0.1, hypergradient_mode="difference")
    before = [answering.score(p, r) for p, r in zip(answering.predict(model, x, y, test), clients)]
    source = EncodedSource(encoded, ["one", "two"], 8, (0,))
    for done in train(method, partial(answering.loss, model), method.init(x, y), source, Schedule(10, 10)):
        last = done
    predictions = answering.predict(model, last.before.x, last.before.y, test)
    for k, rows in enumerate(clients):
        scores = answering.score(predictions[k], rows)
        assert list(scores) == ["f1", "exact_match", "loss"]
        loss, untrained = scores["loss"], before[k]["loss"]
        assert loss is not None and untrained is not None and loss < 0.5 * untrained
        assert all(a.text in r.context for a, r in zip(predictions[k], rows))
    alone = [
        answering.predict(
            model,
            last.before.x[k : k + 1],
            last.before.y[k : k + 1],
            answering.encode([rows], training=False),
        )[0]
        for k, rows in enumerate(clients)
    ]
    assert [[a.text for a in p] for p in predictions] == [[a.text for a in p] for p in alone]


def test_a_question_that_fills_the_window_is_cut_and_counted() -> None:
    answering = task()
    long = row("stone river", "river", question="Where is the key? " * 20)
    encoded = answering.encode([[long, row("salt", "salt")]], training=True)
    assert max(encoded.lengths) <= 40
    assert answering.notes == ["1 training questions are cut to 13 tokens, to leave the context room"]


def test_bad_settings_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="max_length 20 leaves no room for a question beside a stride of 8 tokens"
    ):
        task(max_length=20)
    with pytest.raises(UserError, match="stride is -1"):
        QuestionAnsweringSettings(stride=-1)
    reader("bert").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="max_length is 80, but the model takes 64 tokens"):
        task(max_length=80).load_model(str(tmp_path), torch.float32)
    assert task(max_length=64).load_model(str(tmp_path), torch.float32).config.model_type == "bert"


def test_example_for_the_report() -> None:
    answering, answer = task(no_answers=True), Answer("", 0.9, 0.1, ())
    shown = answering.example(answer, row("stone", ""))
    assert shown == Example("Where is the key?", ("(no answer)",), "(no answer)")
    twice = dataclasses.replace(row("stone", "stone"), answers=("stone", "stone", "the stone"))
    again = answering.example(answer, twice)
    assert again is not None and again.references == ("stone", "the stone")


def test_window_losses_by_hand() -> None:
    start, end = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 0.0]])
    batch = Batch(1, {"start": torch.tensor([1]), "end": torch.tensor([1])})
    expected = (np.log(1 + np.exp(-1)) + np.log(1 + np.exp(2))) / 2
    assert window_losses(start, end, batch).item() == pytest.approx(expected)
