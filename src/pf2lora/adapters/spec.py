"""What the adapters of a run are: their ranks, scalings, places, and the head beside them."""

from __future__ import annotations

from dataclasses import dataclass

from pf2lora.errors import UserError
from pf2lora.settings import setting

ALL_LINEAR = "all-linear"
HEAD_MODES = ("shared", "personal", "frozen")


@dataclass(frozen=True)
class AdapterSpec:
    """`client_rank` 0 leaves out D_kC_k. `scaling` and `client_scaling` are s and s̃ (lora_alpha / r).

    `targets` are module names, name endings or patterns (`*.3.*.query`); empty takes the architecture's query and
    value, "all-linear" every linear layer but the head's and the output layer, as PEFT does. `client_bias` adds, to the
    client's own adapter, a bias for each output of the head's last layer, where that has a bias at all; `client_layer`
    adds all of that layer's weights, too. `head` is trained with x and averaged ("shared"), trained and never sent
    ("personal"), or "frozen".
    """

    rank: int = setting(8, "rank r of the common adapter", everyday=True)
    client_rank: int = setting(2, "rank of the client's own adapter, below --rank", everyday=True)
    scaling: float = setting(1.0, "s, the common adapter's scaling (lora_alpha / r)")
    client_scaling: float = setting(1.0, "the client adapter's scaling")
    dropout: float = setting(0.0, "dropout on the adapters' input")
    targets: tuple[str, ...] = setting(
        (), "layers to adapt: names, endings or patterns, or all-linear (default: query and value)"
    )
    head: str = setting("shared", "the task's head: shared, personal or frozen")
    client_bias: bool | None = setting(
        None,
        "the client's own adapter has a bias for each of the head's outputs (default: with --client-lr auto)",
    )
    client_layer: bool = setting(
        False, "the client's own adapter has a correction of the head's whole last layer, its bias included"
    )

    @property
    def client_head(self) -> tuple[str, ...]:
        """Which parameters of the head's last layer the client corrects."""
        return ("weight", "bias") if self.client_layer else ("bias",) if self.client_bias else ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"rank is {self.rank}; it must be at least 1")
        if not 0 <= self.client_rank <= self.rank:
            raise UserError(
                f"client_rank is {self.client_rank} and rank {self.rank}; the client's adapter is no larger than the "
                f"common one: 0 <= client_rank <= rank"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}; it must lie in [0, 1)")
        if self.head not in HEAD_MODES:
            raise UserError(f"head is {self.head!r}; it must be 'shared', 'personal' or 'frozen'")
