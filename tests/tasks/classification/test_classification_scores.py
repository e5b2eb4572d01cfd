"""Our accuracy and Matthews correlation are scikit-learn's numbers, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, matthews_corrcoef

from pf2lora.tasks.classification.scores import NO_ANSWER, accuracy, matthews


@pytest.mark.parametrize("labels", [2, 3, 20])
@pytest.mark.parametrize("rows", [2, 7, 400])
def test_scores_are_those_of_scikit_learn(labels: int, rows: int) -> None:
    random = np.random.default_rng(rows + labels)
    for lowest in (0, NO_ANSWER):  # also with rows that have no answer
        for _ in range(30):
            gold = random.permutation(np.concatenate([[0, 1], random.integers(0, labels, rows - 2)]))
            found = np.where(random.random(rows) < 0.5, gold, random.integers(lowest, labels, rows))
            assert accuracy(gold, found) == accuracy_score(gold, found)
            assert matthews(gold, found) == matthews_corrcoef(gold, found)


def test_where_all_answers_are_one_label_there_is_no_correlation() -> None:
    gold = np.array([0, 1, 1, 2])
    assert matthews(gold, np.full(4, 1)) == 0.0 == matthews_corrcoef(gold, np.full(4, 1))


def test_of_one_label_it_is_undefined() -> None:
    assert matthews(np.array([1, 1, 1]), np.array([0, 1, 2])) is None
