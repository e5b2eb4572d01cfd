"""Time, memory and the machine's ceiling, measured the same way on CUDA and on a CPU."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch

from pf2lora.run.costs import peak_memory, start_memory_count

HOST = torch.device("cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(
    run: Callable[[], object],
    device: torch.device,
    repeat: int,
    seconds: float = 4.0,
    warm_up: Callable[[], object] | None = None,
) -> float:
    """The median time of `run`, warmed up by itself or `warm_up`: `repeat` times, or as often as fits into `seconds`.

    On CUDA by events, without waiting between one run and the next, as in training. A run that takes longer than
    `seconds` is timed once.
    """
    (warm_up or run)()
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    once = time.perf_counter() - started
    if once > seconds:
        return 1000 * once
    count = min(repeat, int(seconds / once))
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        synchronize(device)
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))
    times = [time.perf_counter()]
    for _ in range(count):
        run()
        times.append(time.perf_counter())
    return 1000 * statistics.median(b - a for a, b in pairwise(times))


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """float32 products in "highest" precision or, with "high", as tf32 where the machine has it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def take_all_but(gigabytes: float, device: torch.device) -> torch.Tensor | None:
    """Make the device one of so many GB: the rest of its memory is taken, as long as what this returns is held."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return torch.empty(max(0, int(free - gigabytes * 1e9)), dtype=torch.uint8, device=device)


def ceiling(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a product of two large square matrices of random numbers."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / (milliseconds(lambda: a @ b, device, 20) / 1000)


def start_memory(device: torch.device) -> None:
    """Free what is left over, and count the peak from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: torch.device) -> float | None:
    """The most memory that was in use on the device; a CPU has none of its own."""
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None


def start_host_memory() -> None:
    """Count the process's peak from here, where the kernel allows it."""
    gc.collect()
    start_memory_count(HOST)


def host_peak_gb() -> float:
    """The most memory that the process held."""
    peak = peak_memory(HOST)
    assert peak is not None, "this system does not tell how much memory a process held"
    return peak / 1e9


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def versions(*packages: str) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)
