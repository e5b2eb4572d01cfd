"""What numbers were made with, and where."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import pf2lora


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    import transformers

    return {
        "pf2lora": pf2lora.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def machine(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """Where they were made, and by how many processes where it was more than one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    found = {"device": str(device), "name": name, "cores": os.cpu_count(), "memory_bytes": memory}
    return found | ({"processes": processes} if processes > 1 else {})
