"""FlexLoRA (Bai et al., *Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources*, NeurIPS 2024): a rank per client, and a server that averages what the factors multiply to.

`Σ_k w_k B_kA_k = UΣVᵀ`, and client k gets `B_k = U_{:r_k} Σ_{:r_k}`, `A_k = V_{:r_k}ᵀ`: the best approximation of the
average in its rank. One answer holds all of them, as the first r_k directions are the same for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pf2lora.core.method import Loss, State, StepStats, gradients, variable
from pf2lora.core.optim import Moments, no_moments
from pf2lora.core.ranks import truncated_svd
from pf2lora.methods.rank_per_client import RankPerClient


class OfRank(NamedTuple):
    """What a client keeps: its optimizer's state and its rank r_k."""

    moments: Moments
    rank: Tensor  # (M,) int64


@dataclass(frozen=True)
class FlexLoRA(RankPerClient):
    """Every round begins in other factors than the last one ended in, so the optimizer begins anew with it."""

    name: ClassVar[str] = "flexlora"
    label: ClassVar[str] = "FlexLoRA"
    summary: ClassVar[str] = "a rank per client; the server averages BA and cuts its SVD to each rank"
    not_private: ClassVar[str] = (
        "its server averages products of each client's factors, not what clients send"
    )

    def init(self, x: Tensor, y: Tensor) -> State:
        rank = self.first_ranks(x)
        x = x * self.kept(rank, x)
        return State(x, y, OfRank(no_moments(x), rank))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_ = variable(s.x)
        loss = F(x_, s.y, batch)
        gradient = gradients(loss, x_)[0] * self.kept(s.opt.rank, s.x)  # truncated entries stay exactly zero
        x, moments = self.descend(gradient, s.opt.moments, s.x)
        return State(x, s.y, s.opt._replace(moments=moments)), StepStats(loss.detach())

    def average(self, sent: Tensor, weights: Tensor) -> Tensor:
        """The factors from the SVD of `Σ_k w_k B_kA_k`; a head is averaged as it is."""
        shared, weights = self.layout.shared_part, weights.to(sent)
        factors = shared.unpack(sent)
        merged = shared.unpack((weights @ sent).unsqueeze(0))
        for B, A in shared.pairs("B", "A"):
            up = (weights.view(-1, 1, 1) * factors[B.name]).movedim(0, 1).flatten(1)  # (m, K r): [w_1B_1, …]
            down = factors[A.name].flatten(0, 1)  # (K r, n): [A_1; …]
            U, S, V = truncated_svd(down.double(), up.double(), A.shape[0])
            merged[B.name] = (U * S).to(sent).unsqueeze(0)
            merged[A.name] = V.mT.to(sent).unsqueeze(0)
        return shared.pack(merged)[0]

    def receive(self, s: State, answer: Tensor, number: int) -> State:
        """A client takes the first r_k directions."""
        s = super().receive(s, answer, number)
        x = s.x * self.kept(s.opt.rank, s.x)
        return State(x, s.y, s.opt._replace(moments=no_moments(x)))
