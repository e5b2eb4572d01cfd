"""How often a run is evaluated where nobody says: answering test rows can take longer than training."""

from __future__ import annotations

from dataclasses import replace

from pf2lora.core.randomness import participants
from pf2lora.run.config import Config
from pf2lora.run.evaluation import evaluation_rounds
from pf2lora.run.sharing import GRADIENT
from pf2lora.run.workload import Workload

FEW_ROWS = 200  # answered in one evaluation: nobody waits long for so few
SHARES = {
    "cpu": 1 / 5
}  # of all the time, evaluation's; a CPU's runs are short, and their curves want some points
SHARE = 1 / 10  # elsewhere


def evaluation_cost(workload: Workload) -> float:
    """How many rounds of training one evaluation is worth, for evaluation to take its share of the time alone. It is
    counted in rows and not by the clock, so that the same run is evaluated after the same rounds wherever it goes on;
    the methods of a comparison all are, by a method of one gradient a step. Nothing where rows are few."""
    config, clients = workload.config, workload.clients
    points = 2 if config.training.evaluate_before else 1
    rows = sum(points * len(c.test) + 2 * len(c.validation) for c in clients)
    if rows < FEW_ROWS:
        return 0.0
    trained = learners_per_round(config, len(clients)) * config.training.steps * config.training.batch_size
    share = SHARES.get(workload.device.type, SHARE)
    return rows / (GRADIENT * trained) * (1 - share) / share


def rounds_to_evaluate(workload: Workload) -> set[int]:
    """The rounds after which the clients of a run are measured."""
    return evaluation_rounds(workload.config.training, evaluation_cost(workload))


def said_aloud(workload: Workload) -> Config:
    """The run's config for somebody who sees none of its rows, as a federation's server: where their number decides
    how often it is evaluated, that is a setting."""
    config = workload.config
    if config.training.evaluate_every is not None or not evaluation_cost(workload):
        return config
    every = min(rounds_to_evaluate(workload))
    return replace(config, training=replace(config.training, evaluate_every=every))


def learners_per_round(config: Config, clients: int) -> int:
    """How many clients take part in a round."""
    training = config.training
    return len(participants(training.seed, 1, clients, training.participation))
