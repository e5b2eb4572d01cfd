"""What a user should look at in a finished run: a loss above its start, client adapters that do not move."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pf2lora.run.result import RoundRecord

HARDLY = 1e-5  # a relative change of y over a round below this counts as not moving


class Moving:
    """Whether client adapters still move."""

    def __init__(self, personal: Tensor) -> None:
        self.previous = personal.clone()
        self.still = [False] * len(personal)

    def look(self, personal: Tensor, participants: Sequence[int]) -> None:
        personal = personal.cpu()
        change = (personal - self.previous).norm(dim=1) / self.previous.norm(dim=1).clamp_min(1e-30)
        for k in participants:
            self.still[k] = bool(change[k] < HARDLY)
        self.previous.copy_(personal)


def training_warnings(
    names: Sequence[str], rounds: Sequence[RoundRecord], still: Sequence[bool]
) -> list[str]:
    """What a user should look at: a loss above its start, client adapters that do not move."""
    found = []
    for k, name in enumerate(names):
        losses = [loss for r in rounds if (loss := r.train_loss[k]) is not None]
        if len(losses) > 1 and losses[-1] > losses[0]:
            found.append(
                f"client {name!r}: the training loss rose above its start ({losses[0]:.3f} → {losses[-1]:.3f}); "
                f"a smaller lr or client_lr may help"
            )
        if still and still[k]:
            found.append(
                f"client {name!r}: its own adapter has stopped moving (less than {HARDLY:g} of its size in the last "
                f"round); a larger client_lr may help"
            )
    return found
