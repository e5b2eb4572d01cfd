"""What a method is: how a client steps, what it sends, how the server merges, what a client does with the answer.

Every tensor has a leading client axis M. The local engine trains all clients in one pass; a site of a real
federation runs the same code with M = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.optim import OPTIMIZERS, Moments, no_moments
from pf2lora.errors import unknown

Loss = Callable[[Tensor, Tensor, Any], Tensor]
"""`F(x, y, batch)`: each client's mean loss on its part of the batch, shape (M,)."""

Tree = TypeVar("Tree")


class State(NamedTuple):
    """What a client has. Only (a part of) `x` is ever sent."""

    x: Tensor  # (M, P) each client's copy of the common adapter, and the head
    y: Tensor  # (M, Q) the client's own adapter; never sent
    opt: Any  # tensors with a leading M: AdamW moments, ranks; never sent


class StepStats(NamedTuple):
    """What a step tells about itself, per client."""

    loss: Tensor  # (M,)
    second_order: Tensor | None = None  # (M,) the second-order term's share of the hypergradient's norm


def over_tensors(function: Callable[..., Tensor], tree: Tree, *rest: Tree) -> Tree:
    """`function` on every tensor of nested tuples of the same shape."""
    if isinstance(tree, Tensor):
        return function(tree, *rest)  # type: ignore[return-value]
    assert isinstance(tree, tuple)
    mapped = [over_tensors(function, *leaves) for leaves in zip(tree, *rest)]
    return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)  # type: ignore[return-value]


def gradients(loss: Tensor, *inputs: Tensor, graph: bool = False) -> tuple[Tensor, ...]:
    """Each client's gradient of its own loss.

    SUM over clients, not mean: a client's gradient must not depend on who trains beside it.
    """
    wrt = [t for t in inputs if t.numel()]
    found = iter(
        torch.autograd.grad(loss.sum(), wrt, create_graph=graph, materialize_grads=True) if wrt else ()
    )
    return tuple(next(found) if t.numel() else torch.zeros_like(t) for t in inputs)


def variable(tensor: Tensor) -> Tensor:
    """The same numbers as a fresh leaf to differentiate by."""
    return tensor.detach().requires_grad_()


@dataclass(frozen=True)
class Method(ABC):
    """A federated method. This base averages x as FedAvg does; a method overrides what it does differently.

    `lr` is the paper's η, the rate of `optimizer` on x: "adamw" as in the paper's experiments on language, or "sgd"
    as in its theory.
    """

    layout: Layout
    lr: float = 1e-3
    weight_decay: float = 0.01
    optimizer: str = "adamw"

    name: ClassVar[str]
    label: ClassVar[str]
    draws: ClassVar[int] = 1  # batches that one local step needs
    two_level: ClassVar[bool] = False  # has client adapters y
    pooled: ClassVar[bool] = False  # one learner on everybody's data
    federated: ClassVar[bool] = True  # exchanges anything at all

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)

    def descend(self, gradient: Tensor, moments: Moments, x: Tensor) -> tuple[Tensor, Moments]:
        """x after one step of the optimizer, and what the optimizer keeps."""
        return OPTIMIZERS[self.optimizer](gradient, moments, x, self.lr, weight_decay=self.weight_decay)

    def init(self, x: Tensor, y: Tensor) -> State:
        """The state before the first step."""
        return State(x, y, no_moments(x))

    def variants_for_round(self, s: State) -> list[Method]:
        """What each client does its next round with: this, unless its state asks for something else."""
        return [self] * s.x.shape[0]

    @abstractmethod
    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        """One local iteration of every client."""

    def send(self, s: State) -> tuple[State, Tensor]:
        """The end of a round: what stays, and what leaves `(M, shared)`."""
        return s, s.x[:, : self.layout.shared]

    def merge(self, sent: Tensor, weights: Tensor) -> Tensor:
        """The server: one common vector from what K clients sent; `weights (K,)` sum to one."""
        return weights.to(sent) @ sent

    def receive(self, s: State, common: Tensor) -> State:
        """What a client does with the server's answer."""
        x = torch.cat([common.expand(s.x.shape[0], -1), s.x[:, self.layout.shared :]], dim=1)
        return s._replace(x=x)

    def personal(self, F: Loss, s: State, batch: Any) -> tuple[Tensor, Tensor]:
        """The (x, y) a client is measured with; `batch` is from its training data."""
        return s.x, s.y

    def sent_numbers(self, s: State) -> list[int]:
        """How many numbers each client sends at the end of a round."""
        return [self.layout.shared] * s.x.shape[0]


def moved(state: State, device: torch.device | str) -> State:
    """The same state on a device."""
    return over_tensors(lambda t: t.to(device), state)


def rows_of(clients: Sequence[int], device: torch.device) -> slice | Tensor:
    """Where the clients' rows are: a slice where they are neighbours, whose rows need not be gathered."""
    start, stop = clients[0], clients[0] + len(clients)
    return (
        slice(start, stop) if list(clients) == [*range(start, stop)] else torch.tensor(clients, device=device)
    )


def take(state: State, clients: Sequence[int]) -> State:
    """The states of some clients: views where they are neighbours, else copies."""
    rows = rows_of(clients, state.x.device)
    return over_tensors(lambda t: t[rows], state)


def put(whole: State, clients: Sequence[int], part: State) -> None:
    """Write some clients' states over their old ones in `whole`."""
    rows = rows_of(clients, whole.x.device)

    def write(old: Tensor, new: Tensor) -> Tensor:
        if isinstance(rows, slice):
            return old[rows].copy_(new)  # straight from the device into its place
        return old.index_copy_(0, rows, new.to(old.device))

    over_tensors(write, whole, part)
