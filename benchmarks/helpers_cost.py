"""What it costs that processes compute a batch together: one gradient whose own arithmetic is next to nothing.

    python benchmarks/helpers_cost.py --processes 2 4 8 --numbers 960000 3600000

`--numbers` are those of x and y. Each process has one thread; the fastest of `--repeat` gradients is told, and that of
one process beside it: the rest is handing out x, y and rows, and adding up what comes back, all on the host.
"""

from __future__ import annotations

import argparse
import json
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from timing import machine, versions
from torch import Tensor

from pf2lora.core.method import gradients, variable
from pf2lora.engines.accumulation import mean_loss
from pf2lora.engines.batches import Batch
from pf2lora.engines.helpers import Computing, Helpers, Numbers, serve

ROWS, LENGTH = 32, 512  # of a batch


def sums(x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A loss that looks at every number once."""
    rows = batch.tensors["input_ids"].shape[0]
    return x.sum(1) * rows, torch.full((1,), float(rows))


def build(order: Any) -> Computing:
    torch.set_num_threads(1)
    return Computing(sums, torch.device("cpu"))


class Forked:
    """A fork of this process that helps it."""

    def __init__(self, channel: Connection, file: int) -> None:
        self.process = get_context("fork").Process(target=serve, args=(channel, file, build), daemon=True)
        self.process.start()
        self.kill = self.process.kill

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        return self.process.exitcode or 0


def fastest(numbers: int, helpers: Helpers | None, repeat: int) -> float:
    """The seconds of a gradient."""
    x, y = variable(torch.zeros(1, numbers)), torch.zeros(1, 0)
    names = ("input_ids", "attention_mask")
    batch = Batch(1, {name: torch.zeros(ROWS, LENGTH, dtype=torch.int64) for name in names})
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        gradients(mean_loss(sums, x, y, batch, ROWS // 2 if helpers is None else None, helpers), x)
        times.append(time.perf_counter() - began)
    return min(times)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--numbers", nargs="+", type=int, default=[960_000, 3_600_000])
    parser.add_argument("--repeat", type=int, default=50)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    where = {"machine": machine(torch.device("cpu")), "versions": versions()}
    for numbers in options.numbers:
        alone = fastest(numbers, None, options.repeat)
        for processes in options.processes:
            memory = Numbers.made(processes - 1, torch.zeros(1, numbers))
            helpers = Helpers(memory, Forked, lambda number: {})
            shared = fastest(numbers, helpers, options.repeat)
            helpers.close()
            row = {"numbers": numbers, "processes": processes, "ms": 1e3 * shared, "alone_ms": 1e3 * alone}
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} | where))


if __name__ == "__main__":
    main()
