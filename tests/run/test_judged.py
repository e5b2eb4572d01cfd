"""What clients' models are judged by: losses and scores of one pass over their validation rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import after, models, seen
from little_world import World, make_world
from tiny_tasks import write_generation_task
from torch import Tensor

from pf2lora.run import deploy, set_up, validation
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.deploy import SERVED
from pf2lora.run.evaluation import Models

VALIDATED: dict[str, Any] = {"validation_ratio": 0.2, "client_lr": "auto"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_scores_that_came_with_the_losses_are_of_the_models_that_are_kept(
    deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is asked again; each learner's score is that of the model it took."""

    def judged(trial: Any, models: Models) -> tuple[Tensor, Tensor]:
        return models.common, models.personal[:, 1]

    def scores(trial: Any, models: Models) -> Tensor:
        raise AssertionError("asked again")

    monkeypatch.setattr(deploy, "losses_and_scores", judged)
    monkeypatch.setattr(deploy, "scores", scores)
    found = deployment(3)
    found.look(after(1), {SERVED: models([1.0] * 3, [3.0] * 3, [1.0] * 3, scores=[0.9, 0.9, 0.1])}, None)
    found.look(after(2), {SERVED: models([2.0] * 3, [2.0] * 3, [2.0] * 3, scores=[0.5] * 3)}, None)
    assert found.best.scores.tolist() == [0.9, 0.5, 0.1]
    assert seen(found) == [(SERVED, 1), (SERVED, 2), (SERVED, 2)]  # the third's earlier model answers worse
    assert found.chosen.scores.tolist() == [0.9, 0.5, 0.5]


@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_losses_that_come_with_scores_are_the_losses(weights: str, world: World) -> None:
    """And the scores those of the same models asked for their answers alone."""
    settings = world.settings(**VALIDATED, method=["homlora"], class_weights=weights)
    trial = set_up.set_up(prepare(from_settings(settings, "test")), "homlora", 0, 1)
    x = trial.state.x + 0.3 * torch.randn(trial.state.x.shape, generator=torch.Generator().manual_seed(0))
    found = Models(x, trial.state.y)
    losses, own = validation.losses_and_scores(trial, found)
    plain = validation.judge(trial, range(6), trial.workload.validation)(*found)
    asked = validation.scores(trial, found)
    trial.model.remove()
    assert own is not None and asked is not None and torch.equal(own, asked)
    assert losses.isnan().sum() == plain.isnan().sum() > 0  # clients have different numbers of rows
    for ours, theirs in zip(losses, plain, strict=True):  # in an order of their own
        torch.testing.assert_close(
            ours.sort().values, theirs.sort().values, rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_a_loss_is_not_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the headline takes too long, or is the loss, by which is chosen already."""
    model, files = write_generation_task(tmp_path, "abc")
    for tokens in (0, 4):
        about = {"task": "generation", "max_new_tokens": tokens, "validation_ratio": 0.3, "max_length": 64}
        settings = about | {"model": str(model), "clients": [str(f) for f in files], "method": ["homlora"]}
        trial = set_up.set_up(prepare(from_settings(settings, "test")), "homlora", 0)
        trial.model.remove()
        monkeypatch.setattr(trial.workload.task, "predict", None)
        assert validation.scores(trial, Models(trial.state.x, trial.state.y)) is None
