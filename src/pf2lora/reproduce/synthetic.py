"""The paper's synthetic experiment (Figure 2): two clients, two low-rank regressions, PF2LoRA beside HETLoRA.

The paper writes `y = xW` with `W = AB`, A (10 × r) and B (r × 10); a LoRA layer computes `h = BAx`. So the paper's
A is the transpose of the layer's A, and Ŵ_k = (BA + D_kC_k)ᵀ here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pf2lora.core.layout import Entry, Layout
from pf2lora.core.method import Method, State
from pf2lora.core.optim import OPTIMIZERS
from pf2lora.core.randomness import generator
from pf2lora.core.ranks import learned_ranks, ninety_percent_rank, reduced_rank_regression
from pf2lora.engines.batches import Batch
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError, unknown
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run.result import POINTS

CLIENTS = ("client 1", "client 2")
SIZE = 10  # of x, and of y = xW
TRUE_RANKS = (3, 4)
NOISE = (0.1, 0.2)
SAMPLES, TRAINING = 1000, 700
RANK, CLIENT_RANK = 4, 2  # PF2LoRA's r and r̃
HET_RANKS, HET_MIN, HET_MAX = (2, 10), 1, 12
METHODS = ("hetlora", "pf2lora")

NOISES: dict[str, Callable[[float], float]] = {"variance": lambda v: v**0.5, "deviation": lambda v: v}
WEIGHT_DECAY = {"sgd": 0.0, "adamw": 0.01}  # the paper is silent; each optimizer's default in torch


@dataclass(frozen=True)
class Settings:
    """The paper's numbers. `upper` is the optimizer of x (of all that HETLoRA trains), `noise` what N(0, v)'s v is."""

    upper: str = "sgd"
    noise: str = "variance"
    steps: int = 2000
    local_steps: int = 10
    lr: float = 0.005
    client_lr: float = 0.002
    hypergradient_mode: str = "exact"
    het_lr: float = 0.002
    het_penalty: float = 0.1
    het_gamma: float = 0.7

    def __post_init__(self) -> None:
        if self.upper not in OPTIMIZERS:
            raise unknown("upper optimizer", self.upper, OPTIMIZERS)
        if self.noise not in NOISES:
            raise unknown("reading of the noise", self.noise, NOISES)
        if self.steps < 1 or self.steps % self.local_steps:
            raise UserError(f"steps is {self.steps}; it must be a positive multiple of {self.local_steps}")

    @property
    def rounds(self) -> int:
        return self.steps // self.local_steps


@dataclass(frozen=True)
class Problem:
    """Both clients' regressions, client axis first. It is a `BatchSource` whose every batch is all training rows."""

    truth: Tensor  # (2, 10, 10) W*_k
    inputs: Tensor  # (2, 1000, 10)
    targets: Tensor  # (2, 1000, 10)
    names: list[str]
    sizes: list[int]

    def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
        rows = {"inputs": self.inputs[:, :TRAINING], "targets": self.targets[:, :TRAINING]}
        return Batch(len(clients), {name: t[list(clients)].flatten(0, 1) for name, t in rows.items()})

    def losses(self, weights: Tensor, rows: slice) -> Tensor:
        """Each client's mean over `rows` of ‖xW − y‖²."""
        return regression_loss(self.inputs[:, rows], self.targets[:, rows], weights)


def regression_loss(inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """`‖XW − Y‖_F² / rows` of each client: squares summed over the outputs, mean over the samples."""
    return (inputs @ weights - targets).square().sum(-1).mean(-1)


def make_problem(seed: int, noise: str = "variance") -> Problem:
    """The paper's data; every random matrix has its own stream."""
    truth, inputs, targets = [], [], []
    for name, rank, size in zip(CLIENTS, TRUE_RANKS, NOISE):
        W = normal(seed, f"{name} A*", SIZE, rank) @ normal(seed, f"{name} B*", rank, SIZE)
        X = normal(seed, f"{name} X", SAMPLES, SIZE)
        truth.append(W)
        inputs.append(X)
        targets.append(X @ W + NOISES[noise](size) * normal(seed, f"{name} noise", SAMPLES, SIZE))
    names, sizes = list(CLIENTS), [TRAINING] * len(CLIENTS)
    return Problem(torch.stack(truth), torch.stack(inputs), torch.stack(targets), names, sizes)


def normal(seed: int, stream: str, *shape: int) -> Tensor:
    """Standard normal numbers in float64, from a stream of their own."""
    return torch.randn(*shape, generator=generator(seed, "synthetic", stream), dtype=torch.float64)


def adapter(down: str, up: str, rank: int) -> Layout:
    """One 10 × 10 layer's adapter."""
    entries = (Entry("W", down, (rank, SIZE)), Entry("W", up, (SIZE, rank)))  # type: ignore[arg-type]
    return Layout(entries, shared=2 * SIZE * rank if down == "A" else 0)


NOTHING = Layout((), shared=0)


@dataclass(frozen=True)
class Learner:
    """A method with its layouts and its start."""

    method: Method
    layout_y: Layout
    start: State
    limits: tuple[int, ...]  # the highest rank that each client's Ŵ_k can have

    def weights(self, x: Tensor, y: Tensor) -> Tensor:
        """Ŵ_k `(M, 10, 10)` as the paper writes it."""
        common, own = self.method.layout.unpack(x), self.layout_y.unpack(y)
        W = common["W.B"] @ common["W.A"]
        if own:
            W = W + own["W.D"] @ own["W.C"]
        return W.mT

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """`F(x, y, batch)`."""
        inputs, targets = (t.unflatten(0, (batch.clients, -1)) for t in batch.tensors.values())
        return regression_loss(inputs, targets, self.weights(x, y))


def pf2lora(seed: int, settings: Settings) -> Learner:
    """All factors N(0, 1), and the row and column spaces of C_kD_k orthogonal to those of AB."""
    layout, layout_y = adapter("A", "B", RANK), adapter("C", "D", CLIENT_RANK)
    A, B = normal(seed, "A", RANK, SIZE), normal(seed, "B", SIZE, RANK)
    C = torch.stack([normal(seed, f"{name} C", CLIENT_RANK, SIZE) for name in CLIENTS])
    D = torch.stack([normal(seed, f"{name} D", SIZE, CLIENT_RANK) for name in CLIENTS])
    C, D = without(A.mT, C.mT).mT, without(B, D)
    method = PF2LoRA(
        layout,
        settings.lr,
        WEIGHT_DECAY[settings.upper],
        settings.upper,
        client_lr=settings.client_lr,
        hypergradient_mode=settings.hypergradient_mode,
    )
    x = layout.pack({"W.A": A, "W.B": B}).expand(len(CLIENTS), -1)
    y = layout_y.pack({"W.C": C, "W.D": D})
    return Learner(method, layout_y, method.init(x.clone(), y), (RANK + CLIENT_RANK,) * len(CLIENTS))


def without(basis: Tensor, columns: Tensor) -> Tensor:
    """The columns less their part in the span of `basis`: still N(0, 1), on the space that is left."""
    Q = torch.linalg.qr(basis).Q
    return columns - Q @ (Q.mT @ columns)


def hetlora(seed: int, settings: Settings) -> Learner:
    """A ~ N(0, 1), B = 0, at the server's rank r_max; a client starts with its first r_k columns."""
    layout = adapter("A", "B", HET_MAX)
    method = HetLoRA(
        layout,
        settings.het_lr,
        WEIGHT_DECAY[settings.upper],
        settings.upper,
        ranks=HET_RANKS,
        r_min=HET_MIN,
        gamma=settings.het_gamma,
        penalty=settings.het_penalty,
    )
    A = normal(seed, "HETLoRA A", HET_MAX, SIZE)
    x = layout.pack({"W.A": A, "W.B": torch.zeros(SIZE, HET_MAX, dtype=A.dtype)}).expand(len(CLIENTS), -1)
    return Learner(method, NOTHING, method.init(x.clone(), x.new_zeros(len(CLIENTS), 0)), HET_RANKS)


LEARNERS: dict[str, Callable[[int, Settings], Learner]] = {"hetlora": hetlora, "pf2lora": pf2lora}


def measure(problem: Problem, learner: Learner, state: State) -> dict[str, list[float]]:
    """One line of the curves: each number is per client."""
    W = learner.weights(state.x, state.y)
    measured = {
        "train_loss": problem.losses(W, slice(0, TRAINING)),
        "test_loss": problem.losses(W, slice(TRAINING, None)),
        "distance": torch.linalg.matrix_norm(W - problem.truth),
        "rank": learned_ranks(learner.method.layout, learner.layout_y, state.x, state.y)[:, 0],
    }
    if isinstance(learner.method, HetLoRA):
        measured["columns"] = state.opt.rank
    return {name: values.tolist() for name, values in measured.items()}


Curves = dict[str, list[list[float]]]  # metric -> rounds 0 … R -> clients


def run_method(
    name: str, seed: int, problem: Problem, settings: Settings, advance: Callable[..., None]
) -> dict[str, Curves]:
    """One method on one problem: its curves at both measuring points, round 0 being the start."""
    learner = LEARNERS[name](seed, settings)
    start = measure(problem, learner, learner.start)
    curves: dict[str, Curves] = {point: {m: [start[m]] for m in start} for point in POINTS}
    schedule = Schedule(settings.rounds, settings.local_steps, seed=seed)
    for done in train(learner.method, learner.loss, learner.start, problem, schedule):
        for point, state in zip(POINTS, (done.served, done.before)):
            for metric, values in measure(problem, learner, state).items():
                curves[point][metric].append(values)
        advance()
    return curves


def optimum(problem: Problem, ranks: Sequence[int]) -> dict[str, Any]:
    """The reduced-rank regression of each client: no Ŵ_k of at most that rank has a smaller training loss."""
    W = torch.stack(
        [
            reduced_rank_regression(problem.inputs[k, :TRAINING], problem.targets[k, :TRAINING], rank)
            for k, rank in enumerate(ranks)
        ]
    )
    distance = torch.linalg.matrix_norm(W - problem.truth)
    return {
        "rank_limit": list(ranks),
        "train_loss": problem.losses(W, slice(0, TRAINING)).tolist(),
        "test_loss": problem.losses(W, slice(TRAINING, None)).tolist(),
        "distance": distance.tolist(),
        "relative_distance": (distance / torch.linalg.matrix_norm(problem.truth)).tolist(),
    }


def run_seed(
    seed: int, settings: Settings, advance: Callable[..., None] = lambda n=1: None
) -> dict[str, Any]:
    """Everything about one seed: the truth, the optima, and both methods' curves."""
    problem = make_problem(seed, settings.noise)
    limits = {name: LEARNERS[name](seed, settings).limits for name in METHODS}
    return {
        "seed": seed,
        "truth": {
            "norm": torch.linalg.matrix_norm(problem.truth).tolist(),
            "rank": list(TRUE_RANKS),
            "rank_90": ninety_percent_rank(torch.linalg.svdvals(problem.truth)).tolist(),
        },
        "optimum": {"true rank": optimum(problem, TRUE_RANKS)}
        | {name: optimum(problem, ranks) for name, ranks in limits.items()},
        "curves": {name: run_method(name, seed, problem, settings, advance) for name in METHODS},
    }


def quartiles(values: Any) -> dict[str, Any]:
    """Median and quartiles over the first axis, the seeds."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75), axis=0)
    return {"median": middle.tolist(), "q1": low.tolist(), "q3": high.tolist()}


def aggregate(runs: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """All seeds together: curves and optima as median and quartiles, and how each method ended."""
    curves, final = {}, {}
    for name in METHODS:
        per_seed = [run["curves"][name] for run in runs]
        curves[name] = {
            point: {m: quartiles([c[point][m] for c in per_seed]) for m in per_seed[0][point]}
            for point in POINTS
        }
        final[name] = {point: ending(runs, name, point) for point in POINTS}
    optima = {
        kind: {m: quartiles([run["optimum"][kind][m] for run in runs]) for m in best if m != "rank_limit"}
        | {"rank_limit": best["rank_limit"]}
        for kind, best in runs[0]["optimum"].items()
    }
    return {
        "experiment": "synthetic",
        "settings": asdict(settings),
        "clients": list(CLIENTS),
        "seeds": [run["seed"] for run in runs],
        "steps": [settings.local_steps * i for i in range(settings.rounds + 1)],
        "curves": curves,
        "optimum": optima,
        "final": final,
        "runs": runs,
    }


def ending(runs: list[dict[str, Any]], method: str, point: str) -> dict[str, Any]:
    """The last round: quartiles of every metric, ‖Ŵ − W*‖ / ‖W*‖, and in how many seeds the rank was W*_k's."""
    last = [{m: rows[-1] for m, rows in run["curves"][method][point].items()} for run in runs]
    relative = [np.divide(end["distance"], run["truth"]["norm"]) for end, run in zip(last, runs)]
    right = [np.equal(end["rank"], run["truth"]["rank_90"]) for end, run in zip(last, runs)]
    return {m: quartiles([end[m] for end in last]) for m in last[0]} | {
        "relative_distance": quartiles(relative),
        "rank_right": np.sum(right, axis=0).tolist(),
    }
