"""A round against the number of processes that share the clients: `python benchmarks/processes_scale.py --json FILE`.

Whole rounds of the local engine under torchrun, with one thread to a process, so that nothing grows but the processes.
Of each number of them the fastest round is told (the machine may have other work), as long as its slowest process
took; how long a process was in the exchange, waiting for the slowest included; and the bytes that one process sends in
a ring.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from shapes import SHAPES, Workload
from timing import machine, versions

from pf2lora.engines.local import train
from pf2lora.engines.processes import Processes
from pf2lora.methods import METHODS
from pf2lora.run.launch import join


@dataclass
class Row:
    """One method with one number of processes."""

    model: str
    method: str
    processes: int
    clients: int
    steps: int
    round_seconds: float
    exchange_seconds: float
    sent_bytes: int
    machine: str
    versions: str


def measured(options: argparse.Namespace, method: str) -> Row | None:
    """In one of the processes: the fastest of some rounds; told by the first."""
    processes = join("cpu")
    shape, device = SHAPES[options.model], torch.device("cpu")
    work = Workload(shape, options.clients, device, rows=4 * shape.batch)
    trial = work.set_up(method, options.clients, rounds=options.rounds, steps=options.steps)
    spent, rounds = 0.0, []
    original = Processes._call

    def timed(self: Processes, *args: Any, **rest: Any) -> None:
        nonlocal spent
        started = time.perf_counter()
        original(self, *args, **rest)
        spent += time.perf_counter() - started

    with patch.object(Processes, "_call", timed):
        for done in train(
            trial.method, trial.F, trial.state, trial.source, trial.schedule, share=trial.learners
        ):
            rounds.append((max(processes.gather(done.seconds)), spent))
            spent = 0.0
    seconds, exchange = min(rounds[1:])
    n = 4 * trial.method.leaves(1).size
    others = processes.size - 1
    sent = others * n * (len(trial.share.here) if trial.method.needs_rows else 2 / processes.size)
    if not processes.first:
        return None
    where = machine(device), versions()
    return Row(
        options.model,
        method,
        processes.size,
        options.clients,
        options.steps,
        seconds,
        exchange,
        int(sent),
        *where,
    )


def started(options: argparse.Namespace, processes: int, method: str) -> Row:
    """The same script as so many processes."""
    own = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        __file__,
        "--inside",
    ]
    for name in ("model", "clients", "rounds", "steps"):
        own += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*own, "--methods", method], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="minilm", choices=SHAPES)
    parser.add_argument(
        "--methods", nargs="+", default=["homlora", "pf2lora", "flexlora"], choices=[*METHODS]
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        torch.set_num_threads(1)
        row = measured(options, options.methods[0])
        if row is not None:
            print(json.dumps(asdict(row)), flush=True)
        return
    rows = []
    print("| method | processes | round, s | speed-up | exchange, ms | sent a process, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method in options.methods:
        alone: float | None = None
        for count in options.processes:
            row = started(options, count, method)
            rows.append(row)
            alone = alone or row.round_seconds * row.processes
            figures = f"{row.round_seconds:.2f} | {alone / row.round_seconds:.2f}"
            print(
                f"| {method} | {count} | {figures} | {1000 * row.exchange_seconds:.0f} | {row.sent_bytes / 1e6:.2f} |",
                flush=True,
            )
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf8")


if __name__ == "__main__":
    main()
