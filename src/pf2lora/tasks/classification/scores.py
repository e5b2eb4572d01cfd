"""Accuracy, Matthews correlation and cross-entropy of one client's predictions."""

from __future__ import annotations

import numpy as np

NO_ANSWER = -1  # equals no label, so that it counts as wrong


def answers(logits: np.ndarray) -> np.ndarray:
    """The most likely label of each row of logits; a row that is not finite is no answer, and no label of all."""
    return np.where(np.isfinite(logits).all(1), logits.argmax(1), NO_ANSWER)


def accuracy(gold: np.ndarray, found: np.ndarray) -> float:
    """The share of right answers."""
    return float((gold == found).mean())


def matthews(gold: np.ndarray, found: np.ndarray) -> float | None:
    """Matthews correlation; undefined (None) where the client's data has one label only.

    scikit-learn gives 0 there, which would count a client as a failure that nobody can pass. Elsewhere this is its
    number, without its checks of the input: a thousand resamplings of a client's rows would wait for them.
    """
    right, given = (np.bincount(labels - NO_ANSWER).astype(float) for labels in (gold, found))
    if np.count_nonzero(right) < 2:
        return None
    both, count = min(len(right), len(given)), float(len(gold))
    covariance = float((gold == found).sum()) * count - right[:both] @ given[:both]
    spread = (count**2 - given @ given) * (count**2 - right @ right)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def log_loss(gold: np.ndarray, logits: np.ndarray) -> float:
    """Mean cross-entropy of the right label; not a number where an output is not."""
    return float(row_losses(gold, logits).mean())


def row_losses(gold: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Each row's cross-entropy of the right label."""
    shifted = logits - logits.max(1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    losses: np.ndarray = -log_probability[np.arange(len(gold)), gold]
    return losses
