"""What a run costs: parameters, bytes sent, floating-point operations, memory. Counted, not estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from pf2lora.core.layout import Layout
from pf2lora.core.method import Loss, Method, State, moved, take
from pf2lora.core.second_order import differentiable_twice
from pf2lora.engines.batches import Batch, EncodedSource
from pf2lora.engines.steps import Step
from pf2lora.run.result import Parameters, SentBytes

BYTES_PER_NUMBER = 4  # x is sent as float32


def parameters(
    method: Method, personal: Layout, state: State, trained: Sequence[int] | None = None
) -> Parameters:
    """Trainable parameters of a client at the start, the mean over clients: those of `state`, unless what each has
    `trained` is given."""
    trained = trained or method.trained_numbers(state)
    return Parameters(sum(trained) / len(trained), method.own_numbers(personal), method.layout.head_size)


@dataclass
class Sent:
    """How many numbers clients sent, how many times one of them did, and how many of the numbers were the head's."""

    total: int = 0
    times: int = 0
    head: int = 0

    def add(self, numbers: int, head: int) -> None:
        self.total, self.times, self.head = self.total + numbers, self.times + 1, self.head + head


def sent_bytes(sent: Sent) -> SentBytes:
    """What a client sends in a round, the mean over rounds and clients; the head apart."""
    times = max(sent.times, 1)
    adapter, head = (n / times * BYTES_PER_NUMBER for n in (sent.total - sent.head, sent.head))
    return SentBytes(adapter, head)


# --- floating-point operations -----------------------------------------------------------------------------


def flops_of_step(method: Method, F: Loss, state: State, batches: Sequence[Any]) -> float:
    """Floating-point operations of one local step of these clients, counted while it runs.

    On the math attention kernel, whose products the counter sees; the fast kernels do the same arithmetic.
    """
    with FlopCounterMode(display=False) as counter, differentiable_twice():
        method.step(F, state, *batches)
    return float(counter.get_total_flops())


@dataclass
class StepLedger:
    """How many client-steps a run did with batches of which lengths, by what each client did (`auto` may leave the
    second-order term out)."""

    steps: dict[Method, dict[tuple[int, ...], int]] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        """One step of `step.clients` clients."""
        lengths = self.steps.setdefault(step.method, {})
        lengths[step.lengths] = lengths.get(step.lengths, 0) + step.clients

    @property
    def total(self) -> int:
        """All client-steps."""
        return sum(times for lengths in self.steps.values() for times in lengths.values())

    def flops(self, F: Loss, source: EncodedSource, state: State, device: torch.device) -> float:
        """The run's operations: those of one client's step are counted for a few lengths, and summed over all.

        A transformer's operations are a polynomial of degree two in the length of a batch, and a step's are a sum over
        its batches: three lengths of each batch determine them.
        """
        first = moved(take(state, [0]), device)
        return sum(_total(method, F, source, first, done) for method, done in self.steps.items())


def _total(
    method: Method, F: Loss, source: EncodedSource, state: State, done: dict[tuple[int, ...], int]
) -> float:
    seen = np.array(list(done))  # (shapes, draws)
    choices = [few_lengths(column) for column in seen.T]
    base = tuple(column[0] for column in choices)
    wanted = {base}
    for draw, lengths in enumerate(choices):
        wanted |= {(*base[:draw], length, *base[draw + 1 :]) for length in lengths[1:]}
    measured = sorted(wanted)
    counted = [flops_of_step(method, F, state, shortest(source, lengths)) for lengths in measured]
    weights = np.linalg.lstsq(powers(np.array(measured)), np.array(counted), rcond=None)[0]
    return float(powers(seen) @ weights @ np.array(list(done.values())))


def few_lengths(seen: np.ndarray) -> list[int]:
    """The least, the greatest and one between them."""
    least, greatest = int(seen.min()), int(seen.max())
    return sorted({least, (least + greatest) // 2, greatest})


def powers(lengths: np.ndarray) -> np.ndarray:
    """1, and T and T² of each batch: what a step's operations are linear in."""
    scaled = lengths / 128.0  # of like size, so that least squares loses no digits
    return np.concatenate([np.ones((len(scaled), 1)), scaled, scaled**2], axis=1)


def shortest(source: EncodedSource, lengths: Sequence[int]) -> list[Batch]:
    """Batches of the shortest row there is, padded to `lengths`: it fits into every length that occurred."""
    index = np.repeat(np.argmin(source.data.lengths), source.size)
    batches = (source.data.rows(index, int(length)) for length in lengths)
    key = torch.zeros(1, dtype=torch.int64, device=source.data.device) if source.keyed else None
    return [Batch(1, tensors, key) for tensors in batches]


# --- memory ------------------------------------------------------------------------------------------------


def start_memory_count(device: torch.device) -> None:
    """Count from here: the device's memory, or the process's where the kernel lets its peak be set back."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR_PEAK.exists():
        try:
            CLEAR_PEAK.write_text("5")  # proc(5): resets the peak resident set size
        except OSError:
            return


def peak_memory(device: torch.device) -> int | None:
    """The most memory in use since the count began; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


CLEAR_PEAK, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
