"""How often a run is evaluated where nobody says: answering rows can take longer than training."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from pf2lora.core.method import GRADIENT
from pf2lora.core.randomness import participants
from pf2lora.methods import METHODS
from pf2lora.run.config import Config
from pf2lora.run.deploy import candidate_names, rounds_alone
from pf2lora.run.rounds import EVALUATIONS, evaluation_rounds
from pf2lora.run.set_up import method_settings
from pf2lora.run.workload import SAMPLE, Workload

FEW_ROWS = 200  # answered in one evaluation: nobody waits long for so few
# Of all the time, evaluation's, by device; a CPU's runs are short, and their curves want some points.
SHARES = {"cpu": 1 / 5}
SHARE = 1 / 10  # elsewhere


class Rows(NamedTuple):
    """The rows that a method passes through the model, with one seed, about: a gradient counts for three passes. It is
    counted and not timed, so that the same run is evaluated after the same rounds wherever it goes on."""

    steps: float  # of a round
    resizing: float  # before them, from the second round on
    evaluation: float  # one
    end: float  # what is asked once more after the last round
    alone: float  # the steps that clients try alone then

    def asked(self, rounds: int, times: int) -> float:
        """Of a whole run that is evaluated so many times, all that is no training."""
        return (rounds - 1) * self.resizing + times * self.evaluation + self.end

    def share(self, rounds: int, times: int) -> float:
        """The part of the run that this is."""
        asked = self.asked(rounds, times)
        return asked / (asked + rounds * self.steps + self.alone)

    def times(self, rounds: int, share: float) -> int:
        """How often a run of so many rounds can be evaluated for all that is asked to have this share of it at most;
        once in any case."""
        most = (rounds * self.steps + self.alone) * share / (1 - share)
        left = most - self.end - (rounds - 1) * self.resizing
        return max(1, int(left / self.evaluation))


def rows_of(workload: Workload, method: str) -> Rows:
    """Counted by what the method says of itself."""
    config, kind, clients = workload.config, METHODS[method], workload.clients
    training, settings = config.training, method_settings(config, method)
    test, validation = sum(len(c.test) for c in clients), sum(len(c.validation) for c in clients)
    taking_part = learners_per_round(config, len(clients))
    steps = taking_part * training.steps * step_rows(config, method)
    batch = training.batch_size
    samples = [Fraction(min(len(client.validation), SAMPLE), batch) for client in clients]
    resizing = sum(batch * kind.resize_batches(settings, rows, training.steps) for rows in samples)
    names = candidate_names(kind)
    points = 2 if kind.federated and training.evaluate_before else 1
    asked = len(names) + kind.resize_passes(settings, serving=True)
    alone = rounds_alone(training) if validation and kind.federated else 0
    return Rows(
        steps,
        resizing * taking_part / len(clients),
        points * test + asked * validation,
        # Every candidate is measured, and what clients chose.
        (len(names) + 2 - points) * test + alone * validation if validation else 0,
        alone * steps,
    )


def step_rows(config: Config, method: str) -> float:
    """Rows that a client's step passes through the model."""
    return config.training.batch_size * GRADIENT * METHODS[method].gradients_per_step


def most_evaluations(workload: Workload, rounds: int) -> int:
    """How often a run of so many rounds is evaluated: the methods of a comparison all are as often, by the one with the
    least room for it."""
    counted = [rows_of(workload, method) for method in workload.config.training.method]
    if max(rows.evaluation for rows in counted) < FEW_ROWS:
        return EVALUATIONS
    share = SHARES.get(workload.device.type, SHARE)
    return min(EVALUATIONS, *(rows.times(rounds, share) for rows in counted))


def rounds_to_evaluate(workload: Workload) -> set[int]:
    """The rounds after which the clients of a run are measured."""
    training = workload.config.training
    return evaluation_rounds(training, most_evaluations(workload, training.rounds))


def said_aloud(workload: Workload) -> Config:
    """The run's config for somebody who sees none of its rows, as a federation's server: where their number decides
    how often it is evaluated, that is a setting."""
    config = workload.config
    if (
        config.training.evaluate_every is not None
        or most_evaluations(workload, config.training.rounds) == EVALUATIONS
    ):
        return config
    every = min(rounds_to_evaluate(workload))
    return replace(config, training=replace(config.training, evaluate_every=every))


def learners_per_round(config: Config, clients: int) -> int:
    """How many clients take part in a round."""
    training = config.training
    return len(participants(training.seed, 1, clients, training.participation))
