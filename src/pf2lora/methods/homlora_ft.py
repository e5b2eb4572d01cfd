"""HOMLoRA + fine-tuning: FedAvg, then some steps of each client alone on all of x before it uses it.

`x̄ = argmin_x (1/M) Σ_k f_k(x)` by FedAvg, and `x_k` is what n steps on f_k make of x̄. The baseline that many
personalized methods are found not to beat (Yu et al., *Salvaging Federated Learning by Local Adaptation*, 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pf2lora.core.method import Loss, State
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA


@dataclass(frozen=True)
class HomLoRAFT(HomLoRA):
    """`finetune_steps` is n; 0 gives HOMLoRA. They are HOMLoRA's steps, with what the client's optimizer knows from its
    rounds."""

    finetune_steps: int = 10

    name: ClassVar[str] = "homlora-ft"
    label: ClassVar[str] = "HOMLoRA + fine-tuning"
    summary: ClassVar[str] = "FedAvg, then steps of each client alone before it uses x"
    personal_part: ClassVar[str] = "x after its own steps"
    adapts_before_use: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.finetune_steps < 0:
            raise UserError(f"finetune_steps is {self.finetune_steps}; it must be 0 or more")

    @property
    def personal_draws(self) -> int:  # type: ignore[override]
        return self.finetune_steps

    def finetuned(self, F: Loss, s: State, *batches: Any) -> Tensor:
        """x after a step on each batch."""
        for batch in batches:
            s, _ = self.step(F, s, batch)
        return s.x

    def personal(self, F: Loss, s: State, *batches: Any) -> tuple[Tensor, Tensor]:
        return self.finetuned(F, s, *batches), s.y
