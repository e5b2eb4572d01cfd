"""The paper's synthetic experiment (Figure 2): two clients, two low-rank regressions, PF2LoRA beside HETLoRA.

The paper writes `y = xW` with `W = AB`, A (10 × r) and B (r × 10); a LoRA layer computes `h = BAx`. So the paper's
A is the transpose of the layer's A, and Ŵ_k = (BA + D_kC_k)ᵀ here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pf2lora.core.layout import Entry, Layout
from pf2lora.core.method import Method, State
from pf2lora.core.optim import OPTIMIZERS
from pf2lora.core.randomness import generator
from pf2lora.core.ranks import Adapters, learned_ranks
from pf2lora.engines.batches import Batch
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError, unknown
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.pf2lora import PF2LoRA

CLIENTS = ("client 1", "client 2")
SIZE = 10  # of x, and of y = xW
TRUE_RANKS = (3, 4)
NOISE = (0.1, 0.2)
SAMPLES, TRAINING, VALIDATION = 1000, 700, 300
RANK, CLIENT_RANK = 4, 2  # PF2LoRA's r and r̃
HET_RANKS, HET_MIN, HET_MAX = (2, 10), 1, 12
METHODS = ("hetlora", "pf2lora")
RATES = {"hetlora": ("het_lr",), "pf2lora": ("lr", "client_lr")}  # what tuning scales in `Settings`

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

    def rates(self, method: str) -> dict[str, float]:
        """The rates that a method trains with, by their names here."""
        return {name: getattr(self, name) for name in RATES[method]}

    def scaled(self, method: str, factor: float) -> Settings:
        """These settings with all of a method's rates times `factor`."""
        rates = {name: factor * rate for name, rate in self.rates(method).items()}
        return replace(self, **rates)  # type: ignore[arg-type]


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
    truth = torch.stack(
        [
            normal(seed, f"{name} A*", SIZE, rank) @ normal(seed, f"{name} B*", rank, SIZE)
            for name, rank in zip(CLIENTS, TRUE_RANKS)
        ]
    )
    inputs, targets = draw_rows(seed, truth, noise, SAMPLES, CLIENTS)
    return Problem(truth, inputs, targets, list(CLIENTS), [TRAINING] * len(CLIENTS))


def validation_rows(seed: int, truth: Tensor, noise: str) -> tuple[Tensor, Tensor]:
    """Further rows of every client's regression, which are neither trained on nor tested on."""
    return draw_rows(seed, truth, noise, VALIDATION, [f"{name} validation" for name in CLIENTS])


def draw_rows(
    seed: int, truth: Tensor, noise: str, rows: int, streams: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """X and Y = XW*_k + ε `(2, rows, 10)`, each client's from its own streams."""
    X = torch.stack([normal(seed, f"{stream} X", rows, SIZE) for stream in streams])
    errors = [
        NOISES[noise](size) * normal(seed, f"{stream} noise", rows, SIZE)
        for stream, size in zip(streams, NOISE)
    ]
    return X, X @ truth + torch.stack(errors)


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

    def rounds(self, seed: int, problem: Problem, settings: Settings) -> Iterator[Round]:
        """The training, round by round; `Diverged` where it diverges."""
        schedule = Schedule(settings.rounds, settings.local_steps, seeds=(seed,), max_bad=0)
        return train(self.method, self.loss, self.start, problem, schedule)


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
        "rank": learned_ranks(Adapters(learner.method.layout, learner.layout_y, state.x, state.y))[:, 0],
    }
    found = {name: values.tolist() for name, values in measured.items()}
    kept = [float(rank) for rank in learner.method.ranks_of(state) if rank is not None]
    return found | ({"columns": kept} if kept else {})
