"""FedAvgM, FedAdam and FedYogi: the average of the clients' changes is a gradient, and the server an optimizer.

Reddi et al., *Adaptive Federated Optimization* (ICLR 2021), Algorithm 2; FedAvgM is Hsu et al., *Measuring the Effects
of Non-Identical Data Distribution for Federated Visual Classification* (2019). With Δ = Σ_k w_k (x_k − x̄):

    FedAvgM   m ← β m + Δ                 x̄ ← x̄ + η m
    FedAdam   m ← β₁ m + (1 − β₁) Δ       x̄ ← x̄ + η m / (√v + τ),   v ← β₂ v + (1 − β₂) Δ²
    FedYogi   the same, with              v ← v − (1 − β₂) Δ² sign(v − Δ²)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from pf2lora.core.method import Loss, Method, State, StepStats, Surroundings, Updates, gradients, variable
from pf2lora.core.optim import Moments, no_moments
from pf2lora.core.rates import RATE
from pf2lora.errors import UserError


class Started(NamedTuple):
    """What a client keeps."""

    moments: Moments
    start: Tensor  # (M, shared) x̄₀, where all began


class Server(NamedTuple):
    """What a server keeps."""

    at: Tensor  # (shared,) x̄ − x̄₀
    mean: Tensor  # (shared,) m
    square: Tensor  # (shared,) v


@dataclass(frozen=True)
class ServerOptimizer(Method):
    """Clients step as HOMLoRA's. What they send, and what they are answered, is counted from the common start x̄₀, which
    every client knows and the server does not: `x_k − x̄₀` and `x̄ − x̄₀`."""

    merges_mean: ClassVar[bool] = True

    def init(self, x: Tensor, y: Tensor) -> State:
        return State(x, y, Started(no_moments(x), x[:, : self.layout.shared].clone()))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_ = variable(s.x)
        loss = F(x_, s.y, batch)
        x, moments = self.descend(gradients(loss, x_)[0], s.opt.moments, s.x)
        return State(x, s.y, s.opt._replace(moments=moments)), StepStats(loss.detach())

    def send(self, s: State, number: int) -> tuple[State, Tensor]:
        return s, s.x[:, : self.layout.shared] - s.opt.start

    def receive(self, s: State, answer: Tensor, number: int) -> State:
        return s._replace(x=self.layout.replaced(s.x, self.layout.shared_part, s.opt.start + answer))

    def with_answer(self, x: Tensor, answer: Tensor, number: int) -> Tensor:
        """Of an x that is the common start."""
        return self.layout.replaced(x, self.layout.shared_part, x[:, : self.layout.shared] + answer)

    def first_server(self, like: Tensor) -> Server:
        return Server(*(like.new_zeros(3, self.layout.shared)))

    def merge(self, sent: Updates, server: Server) -> tuple[Tensor, Server]:
        change = self.average(sent.numbers, sent.weights) - server.at  # Δ
        server = self.server_step(change, server)
        return server.at, server

    @abstractmethod
    def server_step(self, change: Tensor, server: Server) -> Server:
        """The server's x̄, m and v after one step with Δ."""


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """`momentum` is β, `server_lr` η: 1 − β unless it is given, which goes as far as FedAvg in the long run, smoothly
    (η = 1, Hsu et al.'s, goes 1 / (1 − β) times as far). β = 0 gives HOMLoRA.

    It starts β / (1 − β) rounds late: one at 0.5; nine at the 0.9 of runs of a thousand rounds, half of ours.
    """

    momentum: float = 0.5
    server_lr: float | None = None

    name: ClassVar[str] = "fedavgm"
    label: ClassVar[str] = "FedAvgM"
    summary: ClassVar[str] = "FedAvg with momentum at the server"
    run_defaults: ClassVar[Mapping[str, str]] = {"server_lr": "1 − momentum"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decays(momentum=self.momentum)
        check_rates(server_lr=self.rate)

    @property
    def rate(self) -> float:
        """η."""
        return 1 - self.momentum if self.server_lr is None else self.server_lr

    def server_step(self, change: Tensor, server: Server) -> Server:
        mean = self.momentum * server.mean + change
        return Server(server.at + self.rate * mean, mean, server.square)


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """`server_lr` is η, `beta1` and `beta2` are β₁ and β₂, `tau` is τ, how adaptive it is (the larger the less). v
    begins at τ², and there is no bias correction, as in the paper.

    η is about how far a number of x moves in a round. A client's moves by `lr` in a step of AdamW, and the mean of
    clients that agree in part by a few times that in a round of ten: η is three times `lr`, and τ `lr`, unless given.
    β₁ is 0.5 and not the paper's 0.9 for the reason that FedAvgM's β is.
    """

    server_lr: float = 3 * RATE
    beta1: float = 0.5
    beta2: float = 0.99
    tau: float = RATE

    name: ClassVar[str] = "fedadam"
    label: ClassVar[str] = "FedAdam"
    summary: ClassVar[str] = "FedAvg with Adam at the server"
    run_defaults: ClassVar[Mapping[str, str]] = {"server_lr": "three times lr", "tau": "lr"}

    @classmethod
    def set_up(cls, run: Surroundings, settings: Mapping[str, Any]) -> Self:
        lr = settings.get("lr", cls.lr)
        return super().set_up(run, {"server_lr": 3 * lr, "tau": lr} | dict(settings))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(server_lr=self.server_lr, tau=self.tau)
        check_decays(beta1=self.beta1, beta2=self.beta2)

    def first_server(self, like: Tensor) -> Server:
        server = super().first_server(like)
        return server._replace(square=torch.full_like(server.square, self.tau**2))

    def server_step(self, change: Tensor, server: Server) -> Server:
        mean = self.beta1 * server.mean + (1 - self.beta1) * change
        square = self.new_square(change.square(), server.square)
        return Server(server.at + self.server_lr * mean / (square.sqrt() + self.tau), mean, square)

    def new_square(self, squared: Tensor, v: Tensor) -> Tensor:
        """v, from Δ² and the old v."""
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """v follows Δ² by steps whose size is Δ²'s own: it forgets a large one more slowly than Adam's."""

    name: ClassVar[str] = "fedyogi"
    label: ClassVar[str] = "FedYogi"
    summary: ClassVar[str] = "FedAvg with Yogi at the server"

    def new_square(self, squared: Tensor, v: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()


def check_rates(**rates: float) -> None:
    """A UserError for a rate that is not above 0."""
    for name, value in rates.items():
        if not value > 0:
            raise UserError(f"{name} is {value}; it must be above 0")


def check_decays(**decays: float) -> None:
    """A UserError for a decay that is not in [0, 1)."""
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise UserError(f"{name} is {value}; it must lie in [0, 1)")
