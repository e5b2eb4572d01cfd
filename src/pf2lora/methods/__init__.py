"""The methods, a file each. A new algorithm is a new file and a line here; other packages' come through the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pf2lora.registry import Registry

if TYPE_CHECKING:
    from pf2lora.core.method import Method

METHODS: Registry[Method] = Registry(
    "method",
    {
        "pf2lora": "pf2lora.methods.pf2lora:PF2LoRA",
        "pf2lora-joint": "pf2lora.methods.pf2lora_joint:PF2LoRAJoint",
        "homlora": "pf2lora.methods.homlora:HomLoRA",
        "per-fedavg": "pf2lora.methods.per_fedavg:PerFedAvg",
        "hetlora": "pf2lora.methods.hetlora:HetLoRA",
        "homlora-ft": "pf2lora.methods.homlora_ft:HomLoRAFT",
        "homlora-bias": "pf2lora.methods.homlora_bias:HomLoRABias",
        "ditto": "pf2lora.methods.ditto:Ditto",
        "feddpa-t": "pf2lora.methods.feddpa:FedDPAT",
        "feddpa-f": "pf2lora.methods.feddpa:FedDPAF",
        "fedprox": "pf2lora.methods.fedprox:FedProx",
        "fedsa-lora": "pf2lora.methods.fedsa_lora:FedSALoRA",
        "ffa-lora": "pf2lora.methods.ffa_lora:FFALoRA",
        "rolora": "pf2lora.methods.rolora:RoLoRA",
        "fedavgm": "pf2lora.methods.server_optimizers:FedAvgM",
        "fedadam": "pf2lora.methods.server_optimizers:FedAdam",
        "fedyogi": "pf2lora.methods.server_optimizers:FedYogi",
        "scaffold": "pf2lora.methods.scaffold:Scaffold",
        "fedex-lora": "pf2lora.methods.fedex_lora:FedExLoRA",
        "flexlora": "pf2lora.methods.flexlora:FlexLoRA",
        "centralized": "pf2lora.methods.centralized:Centralized",
        "local": "pf2lora.methods.local:Local",
    },
    "pf2lora.core.method:Method",
    other_names={
        "fedavg": "homlora",
        "fedit": "homlora",
        "fedavg-ft": "homlora-ft",
        "fedper": "homlora with --head personal",
        "fedrep": "homlora with --head personal",
        "feddpa": "feddpa-t or feddpa-f",
        "fedsa": "fedsa-lora",
        "ffa": "ffa-lora",
        "fedex": "fedex-lora",
        "flora": "fedex-lora, exact in the same way",
    },
)

SETS: dict[str, tuple[str, ...]] = {
    "paper": ("pf2lora", "pf2lora-joint", "homlora", "per-fedavg", "hetlora", "centralized", "local"),
    "personal": (
        *("pf2lora", "pf2lora-joint", "per-fedavg", "homlora-ft", "homlora-bias", "ditto", "feddpa-t"),
        *("feddpa-f", "fedsa-lora", "local"),
    ),
    "aggregation": (
        *("homlora", "hetlora", "fedprox", "fedavgm", "fedadam", "fedyogi", "scaffold", "ffa-lora"),
        *("rolora", "fedex-lora", "flexlora"),
    ),
}
"""Names for several methods: those of PF2LoRA's paper, those that give each client something of its own, and those that
differ in how one common adapter is trained and averaged. `all` is every method, installed packages' too."""
SET_NAMES = (*SETS, "all")
BOUNDS = ("centralized", "local")  # no federation: what one gives up, and what it must be better than


def group_of(name: str) -> str:
    """Under which heading a long list has a method."""
    if name in BOUNDS:
        return "Bounds"
    if name in SETS["personal"]:
        return "Each client has a part of its own"
    return "One common adapter" if name in SETS["aggregation"] else "Others"


def resolved(names: Sequence[str]) -> tuple[str, ...]:
    """The methods that names and sets of them stand for, each once."""
    found = (SETS.get(name, tuple(METHODS)) if name in SET_NAMES else (name,) for name in names)
    return tuple(dict.fromkeys(name for several in found for name in several))
