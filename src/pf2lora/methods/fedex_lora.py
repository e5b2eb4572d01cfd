"""FedEx-LoRA (Singhal et al., *FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
Models*, ACL 2025); FLoRA (Wang et al., NeurIPS 2024) is exact in the same way.

The average of the factors is not the average of the products. What is missing, the residual

    R ← R + Σ_k w_k B_k A_k − B̄ Ā = R + Σ_k w_k (B_k − B̄)(A_k − Ā),   B̄ = Σ_k w_k B_k,   Ā = Σ_k w_k A_k,

is added to the frozen weights of every client, `W = W_0 + s·(R + B A)`. That of one round has rank (K − 1)·r for K
clients, the sum over rounds in the end that of W_0, and is as large as the model. Here R is the nearest matrix of rank
`residual_rank`, in factors beside B and A: one LoRA of rank r + residual_rank, of which the first r are trained and
sent, and all of it comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from pf2lora.core.layout import Entry, Layout
from pf2lora.core.method import Loss, Method, State, StepStats, Surroundings, Updates, gradients, variable
from pf2lora.core.optim import no_moments
from pf2lora.core.ranks import truncated_svd
from pf2lora.errors import UserError

RESIDUAL = 3  # residual_rank in multiples of r, where it is not given


@dataclass(frozen=True)
class FedExLoRA(Method):
    """`residual_rank` bounds the residual's rank. 0 gives HOMLoRA; (K − 1)·r is exact for one round, a layer's smaller
    dimension for ever. It costs nothing up; down, and in memory beside W_0, `residual_rank / r` times the adapter.

    `trained_rank` is r, all of the adapter's rank where it is 0.
    """

    trained_rank: int = 0

    name: ClassVar[str] = "fedex-lora"
    label: ClassVar[str] = "FedEx-LoRA"
    summary: ClassVar[str] = (
        "the average of the products BA: what averaged factors miss goes into the weights"
    )
    not_private: ClassVar[str] = (
        "its server averages products of each client's factors, not what clients send"
    )
    derived: ClassVar[frozenset[str]] = frozenset({"layout", "trained_rank"})
    run_defaults: ClassVar[Mapping[str, str]] = {"residual_rank": "three times the rank"}

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        return super().parameters() | {"residual_rank": int}

    @classmethod
    def adapter_ranks(cls, rank: int, client_rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
        """The adapter holds the residual, too."""
        rank = given.get("rank", rank)
        residual = given.get("residual_rank", RESIDUAL * rank)
        if residual < 0:
            raise UserError(f"residual_rank is {residual}; it must be at least 0")
        return rank + residual, 0

    @classmethod
    def set_up(cls, run: Surroundings, settings: Mapping[str, Any]) -> Self:
        return cls(run.layout, trained_rank=run.rank, **settings)

    def notes(self) -> list[str]:
        ranks = {e.shape[0] for e in self.layout.entries if e.kind == "A"}
        if not self.trained_rank or ranks <= {self.trained_rank}:
            return []
        times = max(ranks) / self.trained_rank
        return [f"with its residual, what comes back and what a client holds is {times:g} times the adapter"]

    # --- the trained part of x: the first r rows of A and columns of B, and the head -------------------------------

    def trained(self, entries: tuple[Entry, ...]) -> Layout:
        """What is trained of some entries."""
        rank = self.trained_rank or None
        return Layout.of(Entry(e.module, e.kind, e.truncated(rank), e.parameter) for e in entries)

    def cut(self, x: Tensor) -> Tensor:
        """The trained numbers of x `(M, n)`."""
        views = self.layout.unpack(x)
        part = self.trained(self.layout.entries)
        return part.pack({e.name: first(views[e.name], e.shape) for e in part.entries})

    def joined(self, x: Tensor, trained: Tensor) -> Tensor:
        """x with other trained numbers."""
        views = self.layout.unpack(x)
        for entry, new in zip(
            self.layout.entries, self.trained(self.layout.entries).unpack(trained).values()
        ):
            views[entry.name] = with_first(views[entry.name], new)
        return self.layout.pack(views)

    def init(self, x: Tensor, y: Tensor) -> State:
        """The residual begins at zero, in both factors."""
        trained = self.cut(x)
        return State(self.joined(torch.zeros_like(x), trained), y, no_moments(trained))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        old = self.cut(s.x)
        trained_ = variable(old)
        loss = F(self.joined(s.x, trained_), s.y, batch)
        new, moments = self.descend(gradients(loss, trained_)[0], s.opt, old)
        return State(self.joined(s.x, new), s.y, moments), StepStats(loss.detach())

    def trained_numbers(self, s: State) -> list[int]:
        return [self.trained(self.layout.entries).adapter_size] * len(s.x)

    # --- a round's end --------------------------------------------------------------------------------------------

    def leaves(self, number: int) -> Layout:
        return self.trained(self.layout.shared_entries)

    def arrives(self, number: int) -> Layout:
        return self.layout.shared_part

    def send(self, s: State, number: int) -> tuple[State, Tensor]:
        """What is trained and shared, which comes first."""
        return s, self.cut(s.x)[:, : self.leaves(number).size]

    def first_server(self, like: Tensor) -> tuple[Tensor]:
        """The last answer, whose residual the next one adds to."""
        return (like.new_zeros(self.layout.shared),)

    def merge(self, sent: Updates, server: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        leaves, whole = self.leaves(sent.round), self.layout.shared_part
        each = leaves.unpack(sent.numbers)
        mean = leaves.unpack(self.average(sent.numbers, sent.weights).unsqueeze(0))
        answer = {name: view[0] for name, view in mean.items()}
        last = {name: view[0] for name, view in whole.unpack(server[0].unsqueeze(0)).items()}
        weights = sent.weights.to(sent.numbers).view(-1, 1, 1)
        for up, down in self.layout.pairs("B", "A"):
            if up.name not in answer:
                continue
            B, A, rank = answer[up.name], answer[down.name], answer[down.name].shape[0]
            left = [last[up.name][:, rank:], *(weights * (each[up.name] - B))]
            right = [last[down.name][rank:], *(each[down.name] - A)]
            U, V = nearest(torch.cat(left, dim=1), torch.cat(right), up.shape[1] - rank)
            answer[up.name], answer[down.name] = torch.cat([B, U], dim=1), torch.cat([A, V])
        merged = whole.pack({name: t.unsqueeze(0) for name, t in answer.items()})[0]
        return merged, (merged,)


def nearest(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors `(m, rank)` and `(rank, n)` of the matrix of that rank nearest to `up @ down`, each with the roots of the
    singular values; zeros where the product's own rank is lower."""
    U, S, V = truncated_svd(down.double(), up.double(), rank)
    root = S.where(1e-7 * S[:1] < S, 0).sqrt()  # what float32 rounded is no direction
    missing = rank - len(S)
    return pad(U * root, (0, missing)).to(up), pad((V * root).mT, (0, 0, 0, missing)).to(up)


def first(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first rows or columns of `(M, …)`."""
    return tensor[(slice(None), *(slice(size) for size in shape))]


def with_first(tensor: Tensor, new: Tensor) -> Tensor:
    """`tensor (M, …)` with its first rows or columns replaced."""
    for axis, (size, part) in enumerate(zip(tensor.shape, new.shape)):
        if part < size:
            return torch.cat([new, tensor.narrow(axis, part, size - part)], dim=axis)
    return new
