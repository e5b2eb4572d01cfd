"""SQuAD exact match and F1, as the official v1.1 and v2.0 evaluation scripts give them.

The two scripts agree on ordinary questions and differ at the edges, so both rules are kept:

* v2.0 drops golds that normalise to nothing ("the", "..."); a question without any gold left is answered
  correctly by an answer that normalises to nothing, and by no other.
* v1.1 keeps every gold, and two answers that both normalise to nothing match exactly but have F1 0.
* v1.1 scores a question without a prediction 0; v2.0 leaves it out of the totals.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pf2lora.errors import UserError

log = logging.getLogger(__name__)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """One question of a data file: its id and the texts of its gold answers (none: it has no answer)."""

    id: str
    golds: list[str]


def normalize(answer: str) -> str:
    """Lower case, without ASCII punctuation, articles and extra white space, in this order."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str], *, v2: bool = True) -> float:
    """1.0 if the prediction equals one of the golds after normalisation, else 0.0."""
    answer = normalize(prediction)
    return float(any(answer == gold for gold in _normalized(golds, v2)))


def f1(prediction: str, golds: Sequence[str], *, v2: bool = True) -> float:
    """The best F1 of the prediction's words over the golds, after normalisation."""
    words = normalize(prediction).split()
    return max(_word_f1(words, gold.split(), both_empty=float(v2)) for gold in _normalized(golds, v2))


def evaluate(
    dataset: Mapping[str, Any],
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None = None,
    na_threshold: float = 1.0,
) -> dict[str, float]:
    """The values of the official script for a data file, in percent: v1.1 or v2.0, whichever the data is.

    v1.1 gives `exact_match, f1`. v2.0 gives `exact, f1, total`, the same for the questions that have an answer
    (`HasAns_…`) and those that have none (`NoAns_…`), and with `na_probs` (id -> probability that there is no
    answer) `best_exact, best_exact_thresh, best_f1, best_f1_thresh`; a question whose probability is above
    `na_threshold` counts as answered with nothing. Where v2.0 predictions are missing the official script warns
    and then fails; here the questions left out are left out of every total.
    """
    listed = list(questions(dataset))
    _check(listed, predictions)
    if is_v2(dataset):
        return _evaluate_v2(listed, predictions, na_probs, na_threshold)
    if na_probs is not None:
        raise UserError(
            "no-answer probabilities are for SQuAD v2.0 data; these questions all have answers (v1.1)"
        )
    return _evaluate_v1(listed, predictions)


def is_v2(dataset: Mapping[str, Any]) -> bool:
    """Whether a data file is SQuAD v2.0: by its version, or by questions that can be without an answer."""
    if str(dataset.get("version", "")).lstrip("v").startswith("2"):
        return True
    return any("is_impossible" in raw or not raw["answers"] for _, raw in _raw_questions(dataset))


def questions(dataset: Mapping[str, Any]) -> Iterator[Question]:
    """The questions of an official data file, in its order."""
    for place, raw in _raw_questions(dataset):
        answers = raw["answers"]
        if not all(isinstance(answer, dict) and isinstance(answer.get("text"), str) for answer in answers):
            raise UserError(f"SQuAD data: {place}.answers: every answer needs a string 'text'")
        yield Question(raw["id"], [answer["text"] for answer in answers])


def _raw_questions(dataset: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for article_place, article in _items(dataset, "data", ""):
        for paragraph_place, paragraph in _items(article, "paragraphs", f"{article_place}."):
            for place, raw in _items(paragraph, "qas", f"{paragraph_place}."):
                if not isinstance(raw.get("id"), str):
                    raise UserError(f"SQuAD data: {place} has no string 'id'")
                if not isinstance(raw.get("answers"), list):
                    raise UserError(f"SQuAD data: {place} (id {raw['id']}) has no list 'answers'")
                yield place, raw


def _items(parent: Mapping[str, Any], key: str, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in the list `parent[key]`, each with its place in the file."""
    items = parent.get(key) if isinstance(parent, Mapping) else None
    if not isinstance(items, list):
        raise UserError(
            f"SQuAD data: no list {prefix + key!r} (the official format: data > paragraphs > qas)"
        )
    for number, item in enumerate(items):
        place = f"{prefix}{key}[{number}]"
        if not isinstance(item, dict):
            raise UserError(f"SQuAD data: {place} is not an object")
        yield place, item


def _check(listed: list[Question], predictions: Mapping[str, str]) -> None:
    if not listed:
        raise UserError("SQuAD data: there are no questions")
    for question_id, answer in predictions.items():
        if not isinstance(answer, str):
            raise UserError(
                f"prediction for question {question_id}: {answer!r} is not a string ('' is no answer)"
            )
    if not any(question.id in predictions for question in listed):
        raise UserError(
            f"none of the {len(predictions)} predictions is for a question of the data "
            f"(ids like {listed[0].id!r}): is it the file for this data?"
        )


def _normalized(golds: Sequence[str], v2: bool) -> list[str]:
    kept = [normalize(gold) for gold in golds]
    if v2:
        return [gold for gold in kept if gold] or [""]
    if not kept:
        raise ValueError("a v1.1 question has at least one gold answer")
    return kept


def _word_f1(prediction: list[str], gold: list[str], both_empty: float) -> float:
    if not prediction and not gold:
        return both_empty
    shared = sum((Counter(prediction) & Counter(gold)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def _evaluate_v1(listed: list[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    answered = [question for question in listed if question.id in predictions]
    if len(answered) < len(listed):
        log.warning(
            "%d of %d questions have no prediction and score 0", len(listed) - len(answered), len(listed)
        )

    def percent(score: Callable[..., float]) -> float:
        return 100.0 * sum(score(predictions[q.id], q.golds, v2=False) for q in answered) / len(listed)

    return {"exact_match": percent(exact_match), "f1": percent(f1)}


def _evaluate_v2(
    listed: list[Question],
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None,
    na_threshold: float,
) -> dict[str, float]:
    by_id = {question.id: question for question in listed}
    answered = [question for question in by_id.values() if question.id in predictions]
    if len(answered) < len(by_id):
        log.warning(
            "%d of %d questions have no prediction and are left out", len(by_id) - len(answered), len(by_id)
        )
    has_answer = {question.id: bool(question.golds) for question in answered}
    exact = {question.id: exact_match(predictions[question.id], question.golds) for question in answered}
    word_f1 = {question.id: f1(predictions[question.id], question.golds) for question in answered}
    if na_probs is None:
        return _totals(exact, word_f1, has_answer)

    _check_probabilities(na_probs, has_answer)
    silent = {question_id for question_id in has_answer if na_probs[question_id] > na_threshold}
    result = _totals(_silenced(exact, silent, has_answer), _silenced(word_f1, silent, has_answer), has_answer)
    for name, scores in (("exact", exact), ("f1", word_f1)):
        best, threshold = _best_threshold(scores, predictions, na_probs, has_answer)
        result |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return result


def _check_probabilities(na_probs: Mapping[str, float], has_answer: Mapping[str, bool]) -> None:
    for question_id in has_answer:
        if not isinstance(na_probs.get(question_id), int | float):
            raise UserError(f"no-answer probabilities: no number for question {question_id}")


def _silenced(scores: dict[str, float], silent: set[str], has_answer: dict[str, bool]) -> dict[str, float]:
    """The scores when the questions in `silent` are answered with nothing, whatever was predicted."""
    return {key: float(not has_answer[key]) if key in silent else score for key, score in scores.items()}


def _totals(
    exact: dict[str, float], word_f1: dict[str, float], has_answer: dict[str, bool]
) -> dict[str, float]:
    groups = {
        "": list(has_answer),
        "HasAns_": [key for key, answerable in has_answer.items() if answerable],
        "NoAns_": [key for key, answerable in has_answer.items() if not answerable],
    }
    result: dict[str, float] = {}
    for prefix, keys in groups.items():
        if keys:
            result[f"{prefix}exact"] = 100.0 * sum(exact[key] for key in keys) / len(keys)
            result[f"{prefix}f1"] = 100.0 * sum(word_f1[key] for key in keys) / len(keys)
            result[f"{prefix}total"] = len(keys)
    return result


def _best_threshold(
    scores: Mapping[str, float],
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """The best score over all no-answer thresholds, and the smallest threshold that gives it.

    Starts with nothing answered (every question without an answer is right), then answers the questions one by
    one, the most confident first, as the official script does: also between equal probabilities.
    """
    score = best = float(sum(not answerable for answerable in has_answer.values()))
    threshold = 0.0
    for key in sorted((key for key in na_probs if key in scores), key=lambda key: na_probs[key]):
        if has_answer[key]:
            score += scores[key]
        elif predictions[key]:
            score -= 1
        if score > best:
            best, threshold = score, na_probs[key]
    return 100.0 * best / len(scores), threshold
