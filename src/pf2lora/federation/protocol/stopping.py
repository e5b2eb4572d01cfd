"""When a run ends before its last round: the server's `--patience`, by the sites' validation losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pf2lora.run.config import TrainingSettings
from pf2lora.run.watched import Stopper

Answers = Mapping[str, Mapping[str, Any]]
"""The fields of each site's answer in a round."""


def out_of_patience(training: TrainingSettings, rounds: Iterable[Answers]) -> bool:
    """Whether the mean of the sites' validation losses did not fall for as many evaluations as the run waits. Asked of
    all rounds each time: a server that is started again stops where it would have."""
    stopper = Stopper(training.patience)
    evaluations = [losses for answers in rounds if (losses := validation_losses(answers))]
    return any(stopper.enough(torch.tensor(losses)) for losses in evaluations)


def validation_losses(answers: Answers) -> list[float]:
    """The mean validation loss of each site that told one: with what the round before served."""
    told = [answer["validation"] for answer in answers.values() if "validation" in answer]
    return [sums["loss"] / sums["rows"] for sums in told]


def early_stop(training: TrainingSettings, done: int) -> str:
    """Why a run ended after `done` rounds; empty where these are all."""
    if done >= training.rounds:
        return ""
    evaluations = f"{training.patience} evaluation{'s' if training.patience != 1 else ''}"
    return f"stopped after round {done} of {training.rounds}: the mean validation loss did not fall for {evaluations}"
