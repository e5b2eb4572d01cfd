"""The methods, a file each. A new algorithm is a new file and a line here; other packages' come through the door."""

from __future__ import annotations

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
        "centralized": "pf2lora.methods.centralized:Centralized",
        "local": "pf2lora.methods.local:Local",
    },
    "pf2lora.core.method:Method",
)
