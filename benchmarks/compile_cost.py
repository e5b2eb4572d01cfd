"""What compiling takes and gives back: `python benchmarks/compile_cost.py`, on CUDA.

A model's local step of 8 clients, recorded, with and without compiled passes, for two lengths of batches in one
process (the second finds the compiler warm). A row has the seconds until the first step is done (compiling, recording),
the milliseconds of the following, and the operations of training after which compiling has repaid itself.
`run/compiling.py` has its rule from here.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from both_ways import Way, our_step, set_up
from shapes import SHAPES, Workload, batches_of, necessary_flops, start
from timing import machine, milliseconds, synchronize, versions

from pf2lora.atomic import write_json
from pf2lora.run.workload import choose_device

WAY = Way("homlora", None)


def timed(work: Workload, clients: int, *, compiled: bool) -> tuple[float, float, float]:
    """Seconds of the first step, milliseconds of the others, and the operations of one."""
    trial = set_up(work, WAY, clients, compile=compiled)
    try:
        state, step = start(trial), our_step(trial)
        batches = batches_of(trial.source, range(clients), 0, trial.method.draws)
        started = time.perf_counter()
        state, _ = step(state, *batches)
        synchronize(work.device)
        first = time.perf_counter() - started

        def again() -> None:
            nonlocal state
            state, _ = step(state, *batches)

        return first, milliseconds(again, work.device, 20), necessary_flops(trial.model, batches, None)
    finally:
        trial.model.remove()


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["roberta-base", "gpt2-medium"], choices=list(SHAPES))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the rows here, after each")
    given = parser.parse_args(argv)
    device = choose_device("auto")
    rows: list[dict[str, Any]] = []
    for name in given.models:
        for length in (SHAPES[name].length, SHAPES[name].length // 2):
            shape = replace(SHAPES[name], length=length)
            work = Workload(shape, given.clients, device, rows=2 * shape.batch)
            work.to("bfloat16")
            plain_first, plain, operations = timed(work, given.clients, compiled=False)
            first, compiled, _ = timed(work, given.clients, compiled=True)
            repaid = (
                1000 * (first - plain_first) / (plain - compiled) * operations if compiled < plain else None
            )
            found = {
                "model": name,
                "clients": given.clients,
                "length": length,
                "first_seconds": [plain_first, first],
                "ms": [plain, compiled],
                "repaid_operations": repaid,
                "machine": machine(device),
                "versions": versions("torch", "transformers"),
            }
            rows.append(found)
            print(json.dumps(found), flush=True)
            if given.json:
                write_json(given.json, rows)
    return rows


if __name__ == "__main__":
    main()
