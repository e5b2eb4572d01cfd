"""What a run costs: parameters, bytes sent, floating-point operations, memory. Counted, not estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from pf2lora.core.layout import Layout
from pf2lora.core.method import Loss, Method, State
from pf2lora.core.second_order import differentiable_twice

BYTES_PER_NUMBER = 4  # x is sent as float32


def parameters(x: Layout, y: Layout) -> dict[str, int]:
    """Trainable parameters of one client."""
    return {"common": x.adapter_size, "client": y.size, "head": x.head_size}


def bytes_per_round(method: Method, state: State) -> dict[str, float]:
    """What one client sends up in a round, the mean over clients, with the head apart."""
    sent = method.sent_numbers(state) if method.federated else [0]
    shared_head = max(0, method.layout.shared - method.layout.adapter_size)
    head = shared_head if max(sent) else 0
    mean = sum(sent) / len(sent)
    return {"adapter": (mean - head) * BYTES_PER_NUMBER, "head": head * BYTES_PER_NUMBER}


def flops_of_step(method: Method, F: Loss, state: State, batches: Sequence[Any]) -> float:
    """Floating-point operations of one local step of these clients, counted while it runs.

    On the math attention kernel, whose products the counter sees; the fast kernels do the same arithmetic.
    """
    with FlopCounterMode(display=False) as counter, differentiable_twice():
        method.step(F, state, *batches)
    return float(counter.get_total_flops())


def start_memory_count(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """The most memory in use: the device's since the count began, or on a CPU the process's so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
