"""PF2LoRA, the paper's Algorithm 1: `min_x (1/M) Σ_k f_k(x, y*_k(x))`, `y*_k(x) ∈ argmin_y f_k(x, y)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pf2lora.core.hypergradient import bilevel
from pf2lora.core.method import Loss, State, StepStats
from pf2lora.errors import UserError
from pf2lora.methods.bilevel import Bilevel
from pf2lora.methods.own_size import OwnSize


@dataclass(frozen=True)
class PF2LoRA(OwnSize, Bilevel):
    """SGD below (α = `client_lr`), AdamW above (η = `lr`); α = 0 with y = 0 gives HOMLoRA.

    `batches` is 2 (inner π = ζ, outer ξ = ξ̃, as the paper's pseudocode draws them) or 4 (all independent, as
    Algorithm 1 is written). `zeta_size` takes only so many of ζ's examples: a cheaper second-order term.
    """

    batches: int = 2
    zeta_size: int | None = None

    name: ClassVar[str] = "pf2lora"
    label: ClassVar[str] = "PF2LoRA"
    summary: ClassVar[str] = (
        "Algorithm 1: SGD on the own adapter below, AdamW on x by the hypergradient above"
    )
    personal_part: ClassVar[str] = "an adapter of rank r̃"
    gradients_per_step: ClassVar[int] = 3
    derived: ClassVar[frozenset[str]] = OwnSize.derived | Bilevel.derived

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches not in (2, 4):
            raise UserError(f"batches is {self.batches}; PF2LoRA draws 2 batches a step (π = ζ, ξ = ξ̃) or 4")
        if self.zeta_size is not None and self.zeta_size < 1:
            raise UserError(f"zeta_size is {self.zeta_size}; it must be at least 1")

    @property
    def alpha(self) -> float:
        return self.rate

    @property
    def draws(self) -> int:  # type: ignore[override]
        return self.batches

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        if self.batches == 4:
            pi, xi, xi_tilde, zeta = batches  # line 4
        else:
            pi, xi = zeta, xi_tilde = batches
        if self.zeta_size is not None:
            zeta = zeta.spread(self.zeta_size)
        batches, shift = (pi, xi, xi_tilde, zeta), self.shift(s.y)
        hyper = bilevel(
            F, s.x, s.y, self.alpha, self.effective_mode, *batches, shift, self.longest(s.y)
        )  # lines 5, 6
        x, opt = self.follow(hyper, s)  # line 6
        return State(x, hyper.y, opt), StepStats(hyper.loss, hyper.share)
