"""HOMLoRA + bias: FedAvg on x, and for each client and label a number of its own, added to the head's output.

`min_{x, b_k} (1/M) Σ_k f_k(x, b_k)`, x and b_k at once. The least thing that tells clients apart whose labels are
differently frequent; where the task has no head with a bias there is no b_k, and this is HOMLoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pf2lora.core.method import Loss, Method, State, StepStats, gradients, variable


@dataclass(frozen=True)
class HomLoRABias(Method):
    """`bias_lr` is the rate of SGD on b_k, which is all of y; 0 gives HOMLoRA."""

    bias_lr: float = 0.1

    name: ClassVar[str] = "homlora-bias"
    label: ClassVar[str] = "HOMLoRA + bias"
    summary: ClassVar[str] = "FedAvg, and a bias per client and label"
    personal_part: ClassVar[str] = "a bias per label"
    two_level: ClassVar[bool] = True
    client_bias: ClassVar[bool | None] = True
    per_client: ClassVar[frozenset[str]] = Method.per_client | {"bias_lr"}
    scheduled: ClassVar[tuple[str, ...]] = ("lr", "bias_lr")

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        return {name: kind for name, kind in super().parameters().items() if name != "client_rank"}

    @classmethod
    def adapter_ranks(cls, rank: int, client_rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
        return given.get("rank", rank), 0

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        x_, y_ = variable(s.x), variable(s.y)
        loss = F(x_, y_, batch)
        gx, gy = gradients(loss, x_, y_)
        x, opt = self.descend(gx, s.opt, s.x)
        return State(x, s.y - self.bias_lr * gy, opt), StepStats(loss.detach())
