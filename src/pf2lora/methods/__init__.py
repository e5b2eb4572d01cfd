"""The paper's methods, a file each. A new algorithm is a new file and a line here."""

from pf2lora.core.method import Method
from pf2lora.methods.centralized import Centralized
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.local import Local
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.methods.pf2lora_joint import PF2LoRAJoint

METHODS: dict[str, type[Method]] = {
    "pf2lora": PF2LoRA,
    "pf2lora-joint": PF2LoRAJoint,
    "homlora": HomLoRA,
    "per-fedavg": PerFedAvg,
    "hetlora": HetLoRA,
    "centralized": Centralized,
    "local": Local,
}
