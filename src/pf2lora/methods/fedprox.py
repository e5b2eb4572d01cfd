"""FedProx (Li et al., *Federated Optimization in Heterogeneous Networks*, 2020): a client that stays near the average.

`min_x f_k(x) + µ/2 ‖x − x̄‖²` at each client, x̄ the x that its round began with; x is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pf2lora.core.method import Loss, State, StepStats, gradients, variable
from pf2lora.core.optim import Moments, no_moments
from pf2lora.methods.anchored import Anchored


class Near(NamedTuple):
    """What a client keeps."""

    moments: Moments
    anchor: Tensor  # (M, shared) x̄


@dataclass(frozen=True)
class FedProx(Anchored):
    """`mu` is µ; 0 gives HOMLoRA. The optimizer gets the gradient of the whole objective."""

    mu: float = 0.01

    name: ClassVar[str] = "fedprox"
    label: ClassVar[str] = "FedProx"
    summary: ClassVar[str] = "FedAvg whose clients are held near the average"
    per_client: ClassVar[frozenset[str]] = Anchored.per_client | {"mu"}

    def init(self, x: Tensor, y: Tensor) -> State:
        return State(x, y, Near(no_moments(x), self.anchor(x)))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_ = variable(s.x)
        loss = F(x_, s.y, batch)
        gradient = gradients(loss, x_)[0] + self.mu * self.drift(s.x, s.opt.anchor)
        x, moments = self.descend(gradient, s.opt.moments, s.x)
        return State(x, s.y, s.opt._replace(moments=moments)), StepStats(loss.detach())
