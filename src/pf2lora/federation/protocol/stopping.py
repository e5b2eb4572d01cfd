"""When a run ends before its last round: patience, by the sites' validation losses, or too few answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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


def out_of_patience(training: TrainingSettings, evaluations: Sequence[float]) -> bool:
    """Whether the middle of the sites' validation losses did not fall for as many evaluations as the run waits. Asked
    of all of them each time: a server that is started again stops where it would have."""
    stopper = Stopper(training.patience)
    return any(stopper.enough(torch.tensor([loss])) for loss in evaluations)


def middle_loss(answers: Answers, of: str = "loss") -> float | None:
    """The median of the mean validation losses that sites told, with what the round before served (`of` "common": with
    the common adapter of it alone): a mean over sites would let one of them end everybody's run. None where none was
    told."""
    told = [answer["validation"] for answer in answers.values() if of in answer.get("validation", ())]
    return statistics.median(sums[of] / sums["rows"] for sums in told) if told else None


def early_stop(training: TrainingSettings, done: int) -> str:
    """Why a run ended after `done` rounds; empty where these are all."""
    if done >= training.rounds:
        return ""
    evaluations = f"{training.patience} evaluation{'s' if training.patience != 1 else ''}"
    return f"stopped after round {done} of {training.rounds}: the median validation loss did not fall for {evaluations}"
