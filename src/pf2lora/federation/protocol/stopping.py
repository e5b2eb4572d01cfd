"""When a run ends before its last round: patience, by the sites' validation losses, or too few answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pf2lora.errors import UserError
from pf2lora.federation.protocol.plan import Plan
from pf2lora.run.config import TrainingSettings
from pf2lora.run.watched import Stopper

Answers = Mapping[str, Mapping[str, Any]]
"""The fields of each site's answer in a round."""


class QuorumMissed(UserError):
    """Too few usable answers."""

    def __init__(
        self, number: int, got: int, asked: int, plan: Plan, missing: list[str], refused: Mapping[str, str]
    ) -> None:
        self.missing = missing
        why = [f"{site} did not answer within {plan.deadline:g} s" for site in missing]
        why += [f"{site}: {reason}" for site, reason in refused.items()]
        super().__init__(
            f"round {number}: {got} of {asked} sites gave an update and the quorum is {plan.needed(asked)} "
            f"({'; '.join(why) or 'no site was there'}); resumed, the run goes on with this round"
        )


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
