"""ROUGE and exact match: Google's package's numbers, and by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from chat_templates import TEMPLATES, chat_tokenizer

from pf2lora.tasks.generation import rouge
from pf2lora.tasks.generation.conversations import Conversation, Message
from pf2lora.tasks.generation.scores import answer_scores
from pf2lora.tasks.generation.settings import GenerationSettings, TextRow
from pf2lora.tasks.generation.task import SCORES, TEXT_METRICS, Continuation, Generation

GOOGLE = [  # reference, answer; rouge-score 0.1.2 without its stemmer: rouge1, rouge2, rougeL
    (
        "The key is under the stone by the river.",
        "The key lies under a stone, by the river!",
        (7 / 9, 0.5, 7 / 9),
    ),
    ("Yes.", "Yes, it is.", (0.5, 0.0, 0.5)),
    ("one two three four", "four three two one", (1.0, 0.0, 0.25)),
    ("a b c", "", (0.0, 0.0, 0.0)),
    ("a a a b", "a a c", (0.571428571429, 0.4, 0.571428571429)),
    (
        "There are 3 keys; two are in the iron box.",
        "two keys are in the box, there are 3 boxes of iron",
        (0.909090909091, 0.4, 0.454545454545),
    ),
]


@pytest.mark.parametrize(("reference", "answer", "expected"), GOOGLE)
def test_rouge_is_googles(reference: str, answer: str, expected: tuple[float, ...]) -> None:
    found = answer_scores([answer], [[reference]]).values
    assert (found["rouge_1"], found["rouge_2"], found["rouge_l"]) == pytest.approx(expected, abs=1e-11)


def test_the_longest_common_subsequence_by_its_definition() -> None:
    def slow(a: list[str], b: list[str]) -> int:
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, left in enumerate(a):
            for j, right in enumerate(b):
                table[i + 1][j + 1] = (
                    table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
                )
        return table[-1][-1]

    drawn = random.Random(0)
    for _ in range(200):
        a, b = ([drawn.choice("abcde") for _ in range(drawn.randrange(90))] for _ in range(2))
        assert rouge.longest_common(a, b) == slow(a, b)


def test_the_best_reference_counts_and_answers_are_averaged() -> None:
    found = answer_scores(["Yes.", "im  Osten\n"], [["No.", "Yes."], ["Im Osten"]]).values
    assert found == {"rouge_l": 1.0, "rouge_1": 1.0, "rouge_2": 0.5, "exact_match": 0.5}
    assert answer_scores(["Über Nacht"], [["über  nacht"]]).values["rouge_1"] == 1.0
    assert answer_scores(["a  b "], [["a b"]]).values["exact_match"] == 1.0
    assert list(found) == list(SCORES["answers"][1]) and set(found) <= set(TEXT_METRICS)


def test_the_headline_is_taken_again_on_resampled_answers() -> None:
    task = Generation(chat_tokenizer(), GenerationSettings(), scores="answers", chat=True)
    question = Message("user", "a")
    rows: list[TextRow] = [
        Conversation((question, Message("assistant", text))) for text in ("b c", "d", "e f")
    ]
    answers = [Continuation(1.0, 1, text) for text in ("b c", "x", "e")]
    draws = np.array([[0, 0, 0], [0, 1, 2], [2, 2, 1]])
    found = task.resampled(answers, rows, draws)
    assert found is not None
    assert found.tolist() == pytest.approx([1.0, (1 + 0 + 2 / 3) / 3, 4 / 9])
    assert found[1] == pytest.approx(task.score(answers, rows)["rouge_l"])
    assert task.resampled([Continuation(1.0, 1, None)] * 3, rows, draws) is None
    plain = Generation(chat_tokenizer(), GenerationSettings())
    assert plain.resampled(answers, rows, draws) is None


def test_thoughts_and_what_follows_a_turn_are_not_compared() -> None:
    """Of an answer and of its reference; a thought that never ends is followed by no answer."""
    task = Generation(chat_tokenizer(TEMPLATES["chatml"]), GenerationSettings(), scores="answers", chat=True)
    reference = "<think>\nWhere was it?\n</think>\n\nUnder it.<|im_end|>"
    row: TextRow = Conversation((Message("user", "a"), Message("assistant", reference)))
    for text, right in (
        ("Under it.", 1.0),
        ("<think>\nOh.\n</think>\n\nUnder it.", 1.0),
        ("Oh.\n</think>\n\nUnder it.", 1.0),  # a prompt had begun the thought
        ("Under it.<|im_end|>\n<|im_start|>user", 1.0),
        ("<think>\nUnder it.", 0.0),
    ):
        answers = [Continuation(1.0, 1, text)]
        found = task.score(answers, [row])
        assert (found["exact_match"], found["rouge_l"]) == (right, right), text
        resampled = task.resampled(answers, [row], np.array([[0]]))
        assert resampled is not None and resampled.tolist() == [right]
    plain = Generation(chat_tokenizer(), GenerationSettings(), scores="answers")
    assert plain.encoder.compared("<think>a</think>b") == "<think>a</think>b"
