"""FedDPA (Yang et al., *Dual-Personalizing Adapter for Federated Foundation Models*, NeurIPS 2024), in both its forms.

A global adapter, averaged, and one of the same rank that is the client's own, mixed with weight α:
`W_k = W_0 + (1 − α)·s·BA + α·s̃·D_kC_k`. In FedDPA-T both are trained in every round: the own one with the global one,
as it was received and frozen, mixed in; then the global one alone. In FedDPA-F the own one is made after federating:
the global one, fine-tuned alone.

The mixture is one LoRA of rank r + r̃, which is what is measured and exported. The paper weighs each input anew, by how
alike it is to the client's own: `run/instance_weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.layout import NO_LAYOUT, Kind, Layout
from pf2lora.core.method import Loss, Method, State, StepStats, gradients, variable
from pf2lora.core.optim import Moments, no_moments
from pf2lora.errors import UserError
from pf2lora.methods.anchored import Anchored
from pf2lora.methods.homlora_ft import HomLoRAFT


@dataclass(frozen=True)
class Mixture(Method):
    """`mixing_weight` is α, the own adapter's share: 0 uses the global one alone, which is HOMLoRA's, 1 the own one."""

    mixing_weight: float = 0.5
    personal_layout: Layout = NO_LAYOUT

    personal_part: ClassVar[str] = "an adapter of rank r"
    two_level: ClassVar[bool] = True
    client_bias: ClassVar[bool | None] = False
    adapts_before_use: ClassVar[bool] = True
    derived: ClassVar[frozenset[str]] = frozenset({"layout", "personal_layout"})
    run_defaults: ClassVar[Mapping[str, str]] = {"client_rank": "the rank of the global adapter"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mixing_weight <= 1:
            raise UserError(f"mixing_weight is {self.mixing_weight}; the own adapter's share lies in [0, 1]")

    @classmethod
    def adapter_ranks(cls, rank: int, client_rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
        """As in the paper the own adapter has the global one's rank, whatever the run's methods of two levels have."""
        rank = given.get("rank", rank)
        return rank, given.get("client_rank", rank)

    def mixed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`((1 − α)B, A)` and `(αD, C)`; the head is x's."""
        return self.weighed(x, y, 1 - self.mixing_weight, self.mixing_weight)

    def reweighed(self, x: Tensor, y: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """A mixture `(1, P)`, `(1, Q)` with each of the `shares (n,)` in the place of α: `(n, P)` and `(n, Q)`."""
        if not 0 < self.mixing_weight < 1:
            raise UserError(
                f"mixing_weight is {self.mixing_weight}: one of the two adapters is gone, and cannot be weighed anew"
            )
        own = shares.unsqueeze(1).to(x)
        return self.weighed(x, y, (1 - own) / (1 - self.mixing_weight), own / self.mixing_weight)

    def weighed(
        self, x: Tensor, y: Tensor, common: float | Tensor, own: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """B times `common` and D times `own`."""
        return (
            torch.where(of_kind(self.layout, "B", x), common * x, x),
            torch.where(of_kind(self.personal_layout, "D", y), own * y, y),
        )


def of_kind(layout: Layout, kind: Kind, flat: Tensor) -> Tensor:
    """Which numbers of a row belong to tensors of a kind."""
    parts = [flat.new_full((e.size,), e.kind == kind, dtype=torch.bool) for e in layout.entries]
    return torch.cat(parts) if parts else flat.new_zeros(0, dtype=torch.bool)


class Dual(NamedTuple):
    """What a client keeps."""

    moments: Moments
    anchor: Tensor  # (M, shared) the global adapter as it was received
    own_moments: Moments


@dataclass(frozen=True)
class FedDPAT(Mixture, Anchored):
    """Both adapters by `optimizer` at rate `lr`, a gradient each, on the same batch."""

    name: ClassVar[str] = "feddpa-t"
    label: ClassVar[str] = "FedDPA-T"
    summary: ClassVar[str] = "a global and an own adapter, mixed; both trained in every round"
    gradients_per_step: ClassVar[int] = 2
    personal_draws: ClassVar[int] = 0

    def init(self, x: Tensor, y: Tensor) -> State:
        return State(x, y, Dual(no_moments(x), self.anchor(x), no_moments(y)))

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        (batch,) = batches
        y_ = variable(s.y)
        received = torch.cat([s.opt.anchor, s.x[:, self.layout.shared :]], dim=1)
        loss = F(*self.mixed(received, y_), batch)
        y, own_moments = self.descend(gradients(loss, y_)[0], s.opt.own_moments, s.y)
        x_ = variable(s.x)
        alone = F(x_, torch.zeros_like(s.y), batch)
        x, moments = self.descend(gradients(alone, x_)[0], s.opt.moments, s.x)
        return State(x, y, Dual(moments, s.opt.anchor, own_moments)), StepStats(loss.detach())

    def personal(self, F: Loss, s: State, *batches: Any) -> tuple[Tensor, Tensor]:
        return self.mixed(s.x, s.y)


@dataclass(frozen=True)
class FedDPAF(Mixture, HomLoRAFT):
    """HOMLoRA, whose x̄ each client fine-tunes (`finetune_steps`) into an adapter of its own and mixes with x̄; α = 1 is
    HOMLoRA + fine-tuning. A head is mixed, too.

    `scaling` and `client_scaling` are s and s̃: the own adapter is trained with the one and used with the other.
    """

    scaling: float = 1.0
    client_scaling: float = 1.0

    name: ClassVar[str] = "feddpa-f"
    label: ClassVar[str] = "FedDPA-F"
    summary: ClassVar[str] = "a global adapter, then an own one fine-tuned from it, mixed"
    derived: ClassVar[frozenset[str]] = Mixture.derived | {"scaling", "client_scaling"}

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        return {name: kind for name, kind in super().parameters().items() if name != "client_rank"}

    def init(self, x: Tensor, y: Tensor) -> State:
        return super().init(x, torch.zeros_like(y))  # no part of training

    def personal(self, F: Loss, s: State, *batches: Any) -> tuple[Tensor, Tensor]:
        """(x̄, y) mixed: y has the factors of what fine-tuning makes of x̄."""
        common, own = self.layout.unpack(s.x), self.layout.unpack(self.finetuned(F, s, *batches))
        factors = {}
        for B, A in self.layout.pairs("B", "A"):
            factors[f"{A.module}.C"] = own[A.name]
            factors[f"{B.module}.D"] = own[B.name] * (self.scaling / self.client_scaling)
        for head in (e for e in self.layout.entries if e.kind == "head"):
            common[head.name] = torch.lerp(common[head.name], own[head.name], self.mixing_weight)
        return self.mixed(self.layout.pack(common), self.personal_layout.pack(factors))
