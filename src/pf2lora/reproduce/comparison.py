"""The synthetic experiment on one seed: every method with the paper's rates and with its tuned ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pf2lora.core.ranks import ninety_percent_rank, reduced_rank_regression
from pf2lora.engines.bad_clients import Diverged
from pf2lora.reproduce.synthetic import (
    CLIENT_RANK,
    LEARNERS,
    METHODS,
    TRAINING,
    TRUE_RANKS,
    Problem,
    Settings,
    make_problem,
    measure,
)
from pf2lora.reproduce.tuning import Tuning
from pf2lora.run.result import ROUND_POINTS

Curves = dict[str, list[list[float]]]  # metric -> rounds 0 … R -> clients
Plan = dict[str, Settings]  # measuring point -> the settings of the run that is measured there
Plans = dict[str, dict[str, Plan]]  # method -> "paper", "tuned" -> its plan


def make_plans(settings: Settings, tuning: dict[str, Tuning]) -> Plans:
    """Every method with the rates of `settings`, the paper's, and with its tuned ones where it was tuned."""
    plans: Plans = {name: {"paper": dict.fromkeys(ROUND_POINTS, settings)} for name in METHODS}
    for name, tuned in tuning.items():
        plans[name]["tuned"] = {
            point: settings.scaled(name, factor) for point, factor in tuned.chosen.items()
        }
    return plans


def count_runs(plans: Plans) -> int:
    """How many trainings a seed takes: settings that several measurements share are trained once."""
    return sum(len(distinct(of_method)) for of_method in plans.values())


def distinct(plans: dict[str, Plan]) -> list[Settings]:
    """The settings that one method is trained with, each once."""
    return list(dict.fromkeys(settings for plan in plans.values() for settings in plan.values()))


def run_method(name: str, seed: int, problem: Problem, settings: Settings) -> dict[str, Curves] | None:
    """One method on one problem: its curves at both measuring points, round 0 being the start.

    None where it diverged: rates above the paper's may, and one seed must not end the others.
    """
    learner = LEARNERS[name](seed, settings)
    start = measure(problem, learner, learner.start)
    curves: dict[str, Curves] = {point: {m: [start[m]] for m in start} for point in ROUND_POINTS}
    try:
        for done in learner.rounds(seed, problem, settings):
            for point, state in zip(ROUND_POINTS, (done.served, done.before)):
                for metric, values in measure(problem, learner, state).items():
                    curves[point][metric].append(values)
    except Diverged:
        return None
    return curves


@dataclass(frozen=True)
class Truth:
    """W*_k of both clients: its Frobenius norm, its rank, and its rank by the 90% rule.

    `served_floor` bounds `√(Σ_k ‖Ŵ_k − W*_k‖²) / √(Σ_k ‖W*_k‖²)` of PF2LoRA from below after averaging.
    """

    norm: list[float]
    rank: list[int]
    rank_90: list[int]
    served_floor: float


@dataclass(frozen=True)
class Optimum:
    """Each client's reduced-rank regression: no Ŵ_k of at most that rank has a smaller training loss."""

    rank_limit: list[int]
    metrics: dict[str, list[float]]


@dataclass(frozen=True)
class SeedRun:
    """Everything about one seed. Where a run diverged, its curves are None."""

    seed: int
    truth: Truth
    optimum: dict[str, Optimum]  # at the true rank, and at the highest that each method allows
    curves: dict[str, dict[str, dict[str, Curves | None]]]  # method -> "paper", "tuned" -> measuring point


def served_floor(truth: Tensor) -> float:
    """How near to both W*_k PF2LoRA can come served, whatever its rates.

    With one AB for both, Ŵ_1 − Ŵ_2 = C_1D_1 − C_2D_2 has rank 2r̃ at most, and half of what W*_1 − W*_2 has beyond that
    rank, in squares, is left in the two errors together.
    """
    beyond = torch.linalg.svdvals(truth[0] - truth[1])[2 * CLIENT_RANK :]
    return (torch.linalg.vector_norm(beyond) / torch.linalg.vector_norm(truth) / 2**0.5).item()


def optimum(problem: Problem, ranks: Sequence[int]) -> Optimum:
    """The reduced-rank regressions at these ranks, and how they score."""
    W = torch.stack(
        [
            reduced_rank_regression(problem.inputs[k, :TRAINING], problem.targets[k, :TRAINING], rank)
            for k, rank in enumerate(ranks)
        ]
    )
    distance = torch.linalg.matrix_norm(W - problem.truth)
    measured = {
        "train_loss": problem.losses(W, slice(0, TRAINING)),
        "test_loss": problem.losses(W, slice(TRAINING, None)),
        "distance": distance,
        "relative_distance": distance / torch.linalg.matrix_norm(problem.truth),
    }
    return Optimum(list(ranks), {name: values.tolist() for name, values in measured.items()})


def run_seed(
    seed: int, settings: Settings, plans: Plans | None = None, advance: Callable[[], None] = lambda: None
) -> SeedRun:
    """The truth, the optima, and every method's curves under each of its plans (the paper's rates if not told).

    `advance` is called after each training.
    """
    problem = make_problem(seed, settings.noise)
    limits = {name: LEARNERS[name](seed, settings).limits for name in METHODS}
    truth = Truth(
        torch.linalg.matrix_norm(problem.truth).tolist(),
        list(TRUE_RANKS),
        ninety_percent_rank(torch.linalg.svdvals(problem.truth)).tolist(),
        served_floor(problem.truth),
    )
    optima = {"true rank": TRUE_RANKS} | limits
    curves = {}
    for name, of_method in (plans or make_plans(settings, {})).items():
        runs = {}
        for chosen in distinct(of_method):
            runs[chosen] = run_method(name, seed, problem, chosen)
            advance()
        curves[name] = {
            rates: {point: at(runs[chosen], point) for point, chosen in plan.items()}
            for rates, plan in of_method.items()
        }
    return SeedRun(seed, truth, {kind: optimum(problem, ranks) for kind, ranks in optima.items()}, curves)


def at(curves: dict[str, Curves] | None, point: str) -> Curves | None:
    """A run's curves at one measuring point, if it did not diverge."""
    return None if curves is None else curves[point]
