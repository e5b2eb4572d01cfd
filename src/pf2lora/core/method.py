"""What a method is: how a client steps, what it sends, how the server merges, what a client does with the answer.

Every tensor has a leading client axis M. The local engine trains all clients in one pass; a site of a real
federation runs the same code with M = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, get_type_hints

import torch
from torch import Tensor

from pf2lora.core.choice import Judge
from pf2lora.core.layout import NO_LAYOUT, Layout
from pf2lora.core.optim import OPTIMIZERS, Moments, no_moments
from pf2lora.core.rates import RATE, GivenRate
from pf2lora.errors import unknown

Loss = Callable[[Tensor, Tensor, Any], Tensor]
"""`F(x, y, batch)`: each client's mean loss on its part of the batch, shape (M,)."""

GRADIENT = 3  # passes forward that a gradient costs as much as

Tree = TypeVar("Tree")


class State(NamedTuple):
    """What a client has. Only (a part of) `x`, and what a method declares beside it, is ever sent."""

    x: Tensor  # (M, P) each client's copy of the common adapter, and the head
    y: Tensor  # (M, Q) the client's own adapter; never sent
    opt: Any  # all else it keeps, tensors with a leading M: AdamW moments, ranks, copies of x; never sent


class Updates(NamedTuple):
    """What a server gets at a round's end from the K clients that took part."""

    numbers: Tensor  # (K, n) laid out as the method's `leaves`
    weights: Tensor  # (K,) they sum to one
    clients: tuple[int, ...]  # their positions among all of the federation's clients
    round: int  # from 1


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


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, in order."""
    found: list[Tensor] = []
    over_tensors(lambda t: found.append(t) or t, tree)  # type: ignore[func-returns-value]
    return found


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
class Surroundings:
    """What a run tells a method that is set up: the common adapter's `layout` and the client's own, the run's rank r,
    how many `clients` there are in all and at which `positions` among them are those at hand (a site of a federation
    has one), the base model's `precision`, which of these have validation rows to choose by, and s and s̃."""

    layout: Layout
    rank: int
    clients: int
    positions: tuple[int, ...]
    precision: str = "float32"
    personal_layout: Layout = NO_LAYOUT
    validated: tuple[bool, ...] = ()
    scaling: float = 1.0
    client_scaling: float = 1.0


@dataclass(frozen=True)
class Method(ABC):
    """A federated method. This base averages x as FedAvg does; a method overrides what it does differently.

    `lr` is the paper's η, the rate of `optimizer` on x: "adamw" as in the paper's experiments on language, or "sgd"
    as in its theory.
    """

    layout: Layout
    lr: float = RATE
    weight_decay: float = 0.01
    optimizer: str = "adamw"

    name: ClassVar[str]
    label: ClassVar[str]
    # For lists of methods, in words.
    summary: ClassVar[str] = ""
    sent_part: ClassVar[str] = "x"
    personal_part: ClassVar[str] = "nothing"
    gradients_per_step: ClassVar[int] = 1  # about: a bar and an estimate of a run's length go by it
    draws: ClassVar[int] = 1  # batches that one local step needs
    two_level: ClassVar[bool] = False  # has client adapters y
    pooled: ClassVar[bool] = False  # one learner on everybody's data
    not_private: ClassVar[str] = ""  # why noise on the mean of what clients send would not protect them
    federated: ClassVar[bool] = True  # exchanges anything at all
    merges_mean: ClassVar[bool] = False  # a `merge` of its own needs no more than `average` of what was sent
    adapts_before_use: ClassVar[bool] = (
        False  # `personal` does something: clients do not use x and y as they are
    )
    personal_draws: ClassVar[int] = 1  # batches that `personal` needs
    client_bias: ClassVar[bool | None] = None  # y has a bias per output of the head; None: as the run says
    # Fields that no user sets: they follow from the run.
    derived: ClassVar[frozenset[str]] = frozenset({"layout"})
    # Numbers of which clients that train together may have different ones: a step finds such a field as a tensor (M, 1)
    # then. And those of them that a run's schedule multiplies, the rates of learning itself.
    per_client: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    scheduled: ClassVar[tuple[str, ...]] = ("lr",)
    # In words, where `set_up` has a default of its own.
    run_defaults: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)

    @property
    def resizes(self) -> bool:
        """Whether `resize` does something: the client asks its validation rows."""
        return False

    def resizes_before(self, done: int, steps: int, batches: Fraction) -> bool:
        """Whether it does before a round of so many `steps`, where the client has `done` so many in its rounds before,
        and so many batches' worth of validation rows to ask; always before a model is used."""
        return False

    # --- set-up ---------------------------------------------------------------------------------------------

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """What a user may set in `[methods.NAME]`, with its type: the method's own fields and its adapter's ranks. `lr`
        may be left to the model; a method that is set up has a number."""
        hints = get_type_hints(cls)
        own = {f.name: hints[f.name] for f in fields(cls) if f.name not in cls.derived}
        return own | {"lr": GivenRate, "rank": int} | ({"client_rank": int} if cls.two_level else {})

    @classmethod
    def adapter_ranks(cls, rank: int, client_rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
        """The ranks (r, r̃) of this method's adapter, from the run's and from what `[methods.NAME]` gives."""
        own = given.get("client_rank", client_rank) if cls.two_level else 0
        return given.get("rank", rank), own

    @classmethod
    def head_placement(cls, head: str) -> str:
        """Where this method has the head (shared, personal or frozen), from where the run wants it."""
        return head

    @classmethod
    def set_up(cls, run: Surroundings, settings: Mapping[str, Any]) -> Self:
        """The method in its run; `settings` are values for its own fields."""
        follows = {name: getattr(run, name) for name in cls.derived if hasattr(run, name)}
        return cls(**follows, **settings)

    def batch_size(self, size: int, learners: int) -> int:
        """Examples in a batch where the run gives each of `learners` clients `size`."""
        return size

    def notes(self) -> list[str]:
        """What a user should know before it runs."""
        return []

    def findings(self, shares: Sequence[float | None]) -> list[str]:
        """What a user should know after it ran; `shares` has, for every client and round, the second-order term's
        share of the hypergradient, or None where it was not computed."""
        return []

    # --- a step ---------------------------------------------------------------------------------------------

    def with_rates(self, rates: Mapping[str, Tensor]) -> Self:
        """This method for one step, with tensors (M, 1) in the place of some of its numbers."""
        if not rates:
            return self
        changed = copy(self)
        for name, value in rates.items():
            object.__setattr__(changed, name, value)  # not by `replace`, which checks numbers
        return changed

    def descend(self, gradient: Tensor, moments: Moments, x: Tensor) -> tuple[Tensor, Moments]:
        """x after one step of the optimizer, and what the optimizer keeps."""
        return OPTIMIZERS[self.optimizer](gradient, moments, x, self.lr, weight_decay=self.weight_decay)

    def init(self, x: Tensor, y: Tensor) -> State:
        """The state before the first step."""
        return State(x, y, no_moments(x))

    def variants_for_round(self, s: State, number: int) -> list[Method]:
        """What each client does round `number` with: this, unless the round or its state asks for something else."""
        return [self] * s.x.shape[0]

    @abstractmethod
    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        """One local iteration of every client."""

    # --- a round's end --------------------------------------------------------------------------------------
    # Rounds count from 1. What crosses the network is what `leaves` and `arrives` declare, and nothing else: entries
    # that `layout` shares, and such as belong to them (`Entry.beside`). y and the optimizer's state are never sent.

    def leaves(self, number: int) -> Layout:
        """What a client sends at the end of round `number`."""
        return self.layout.shared_part if self.federated else NO_LAYOUT

    def arrives(self, number: int) -> Layout:
        """What the server answers after round `number`. Whoever gets it needs none of the earlier answers: some clients
        were not there."""
        return self.leaves(number)

    def send(self, s: State, number: int) -> tuple[State, Tensor]:
        """The end of round `number`: what stays, and what leaves `(M, n)`."""
        return s, self.layout.select(s.x, self.leaves(number))

    def average(self, sent: Tensor, weights: Tensor) -> Tensor:
        """One vector `(n,)` from what K clients sent; `weights (K,)` sum to one."""
        return weights.to(sent) @ sent

    def first_server(self, like: Tensor) -> Any:
        """What the server keeps between rounds, before the first: (nested tuples of) tensors whose shapes stay, of the
        dtype and on the device of `like`. Servers know no client's start, nor the base model."""
        return ()

    def merge(self, sent: Updates, server: Any) -> tuple[Tensor, Any]:
        """The server: its answer, `(n,)` or one for each of the federation's clients `(clients, n)`, and what it keeps
        from now on."""
        return self.average(sent.numbers, sent.weights), server

    @property
    def needs_rows(self) -> bool:
        """Whether `merge` looks at more of what was sent than its weighted mean: several processes that share the
        clients send each other all of it then."""
        own_way = type(self).average is not Method.average or type(self).merge is not Method.merge
        return own_way and not self.merges_mean

    def with_answer(self, x: Tensor, answer: Tensor, number: int) -> Tensor:
        """`x (M, P)` with the server's answer to round `number` in it: `(n,)`, or one for each client `(M, n)`."""
        return self.layout.replaced(x, self.arrives(number), answer)

    def receive(self, s: State, answer: Tensor, number: int) -> State:
        """What a client does with the server's answer to round `number`, whether it took part or not."""
        return s._replace(x=self.with_answer(s.x, answer, number))

    def common(self, start: Tensor, answer: Tensor, number: int) -> Tensor:
        """What all clients share after round `number`, `(M, P)` for M federations; what stays at home is as in `start
        (M, P)`, where all began. Where answers differ, `(M, clients, n)`, it is their mean."""
        return self.with_answer(start, answer.mean(1) if answer.dim() == 3 else answer, number)

    def resize(self, s: State, judge: Judge, *, serving: bool = False) -> State:
        """What a client makes of its own state once the answer is in it, by its validation rows: before it trains on,
        and (`serving`) before it is used or measured."""
        return s

    @classmethod
    def resize_passes(cls, settings: Mapping[str, Any], *, serving: bool = False) -> int:
        """How often `resize` passes a validation row through the model, with these values of the method's fields."""
        return 0

    @classmethod
    def resize_batches(cls, settings: Mapping[str, Any], batches: Fraction, steps: int) -> float:
        """How many batches' worth of rows it passes before a round (`resizes_before`), the mean over rounds."""
        return 0.0

    def personal(self, F: Loss, s: State, *batches: Any) -> tuple[Tensor, Tensor]:
        """The (x, y) a client is measured with; `batches` are from its training data."""
        return s.x, s.y

    # --- what it costs --------------------------------------------------------------------------------------

    def ranks_of(self, s: State) -> list[int | None]:
        """The rank of each client's common adapter where it is below the layout's: only that part is trained and
        sent. None: all of it."""
        return [None] * s.x.shape[0]

    def sent_numbers(self, s: State, number: int) -> list[int]:
        """How many numbers each client sends at the end of round `number`."""
        leaves = self.leaves(number).entries
        return [sum(e.truncated_size(rank) for e in leaves) for rank in self.ranks_of(s)]

    def trained_numbers(self, s: State) -> list[int]:
        """How many numbers of the common adapter, without the head, each client trains."""
        adapter = [e for e in self.layout.entries if e.kind != "head"]
        return [sum(e.truncated_size(rank) for e in adapter) for rank in self.ranks_of(s)]

    def own_numbers(self, personal: Layout) -> int:
        """How many numbers of a client are its own, beside x; `personal` is the layout of y."""
        return personal.size


def moved(state: State, device: torch.device | str) -> State:
    """The same state on a device. Whoever brings it back waits, so that what it is copied from may change then."""
    to_device = torch.device(device).type != "cpu"
    return over_tensors(lambda t: t.to(device, non_blocking=to_device), state)


def rows_of(clients: Sequence[int], device: torch.device) -> slice | Tensor:
    """Where the clients' rows are: a slice where they are neighbours, whose rows need not be gathered."""
    start = clients[0] if clients else 0
    stop = start + len(clients)
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
