"""Deployments by hand: learners whose models are nothing but losses and a score."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pf2lora.engines.share import Share
from pf2lora.run import deploy
from pf2lora.run.deploy import Deployment
from pf2lora.run.evaluation import Models


def deployments(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Deployment]:
    """A deployment of some learners whose models are nothing but losses and a score on validation rows."""
    monkeypatch.setattr(deploy, "losses_and_scores", lambda trial, models: (models.common, None))
    monkeypatch.setattr(deploy, "scores", lambda trial, models: models.personal[:, 1])

    def make(clients: int, keep: str = "best", seeds: tuple[int, ...] = (0,)) -> Deployment:
        training = SimpleNamespace(keep=keep, personal_steps=0)
        config = SimpleNamespace(training=training)
        workload = SimpleNamespace(clients=[None] * clients, validation="rows", config=config)
        method, schedule = SimpleNamespace(federated=True), SimpleNamespace(privacy=None)
        parts: Any = {"workload": workload, "method": method, "schedule": schedule}
        trial: Any = SimpleNamespace(seeds=seeds, share=Share.of_one(clients), **parts)
        return Deployment(trial)

    return make


def models(*losses: list[float], scores: list[float] | None = None) -> Models:
    """Each learner's losses; its y is its number and its score, the same for all models unless it is given."""
    rows = torch.tensor(losses, dtype=torch.float64)
    own = [[float(k), 0.5 if scores is None else scores[k]] for k in range(len(rows))]
    return Models(rows, torch.tensor(own, dtype=torch.float64))


def after(number: int) -> Any:
    return SimpleNamespace(number=number)


def seen(found: Deployment) -> list[tuple[str, int]]:
    found.choose()
    return [(choice.candidate, choice.round) for choice in found.choices()]
