"""Milliseconds of one local step of all clients, beside the plain way to do it: `python benchmarks/step_time.py`.

(a) the plain way is a PEFT model with two active adapters, clients one by one, exact double backward on eager
    attention as in the paper's pseudocode, AdamW of torch; HOMLoRA, and PF2LoRA without the second-order term, on sdpa
    attention (`plain_peft.py`). bfloat16 is a bfloat16 base model with float32 adapters, as PEFT does by itself.
    A few clients are timed (`plain_clients_timed`) and multiplied: it is client by client.
(b) is this project. `difference` computes the same hypergradient as `exact`, so both stand beside the exact plain way.

First, both make the same steps from the same start in float32, and the largest difference of a loss is reported.
Then each is timed on batches that are drawn beforehand, float32 with tf32 products on CUDA. Where texts have varied
lengths (`--minilm`), both sides see the same rows: the plain way in their shuffled order (with `--same-batches` in this
project's), this project with rows of like length together, as in training. The share is that of the machine's product
of two large square matrices, counting only necessary arithmetic (`shapes.py`: `necessary_flops`).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from both_ways import (
    CHECKED_CLIENTS,
    CHECKED_STEPS,
    HYPERGRADIENTS,
    Timed,
    Way,
    loss_differences,
    time_passes,
    time_plain,
)
from shapes import SHAPES, Workload
from timing import ceiling, float32_products, machine, versions

from pf2lora.run.set_up import WINDOW
from pf2lora.run.workload import DTYPES, choose_device


class Case(NamedTuple):
    """What one row is about."""

    model: str
    clients: int
    precision: str
    way: Way


@dataclass
class Row:
    """One case. `ratio` is plain_ms / ours_ms; memory is the device's, the base model included; None: not measured."""

    model: str
    clients: int
    batch: int
    length: int
    precision: str
    method: str
    hypergradient_mode: str | None
    plain_ms: float | None
    ours_ms: float
    ratio: float | None
    peak_gb: float | None
    ceiling_share: float
    max_loss_difference: float | None
    plain_peak_gb: float | None
    plain_clients_timed: int
    clients_per_pass: int
    ceiling_tflops: float
    machine: str
    versions: str


class Measurement:
    """One run of the benchmark: its rows so far, and what the budget left out."""

    def __init__(self, options: argparse.Namespace) -> None:
        on_cpu = options.small or options.minilm or not torch.cuda.is_available()
        self.options, self.device = options, choose_device("cpu" if on_cpu else "cuda")
        self.started = time.perf_counter()
        self.rates: dict[str, float] = {}
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        pairs = [
            (m, h) for m in options.methods for h in (options.hypergradients if m == "pf2lora" else [None])
        ]
        self.ways = [Way(method, hypergradient) for method, hypergradient in pairs]

    def over(self, *what: object) -> bool:
        """Whether the budget is spent; what is not started then is named at the end."""
        if time.perf_counter() - self.started > self.options.budget:
            self.skipped.append(" ".join(str(w) for w in what if w is not None))
        return bool(self.skipped)

    def model(self, name: str) -> None:
        """The cases of one model: the check in float32, then every precision."""
        if self.over(name):
            return
        shape, options = SHAPES[name], self.options
        rows = shape.batch * 2 * max(options.sets, CHECKED_STEPS)
        work = Workload(shape, max(*options.clients, CHECKED_CLIENTS), self.device, rows=rows)
        differences = {} if options.skip_plain else loss_differences(work, self.ways)
        for precision in sorted(options.precisions, key=list(DTYPES).index):  # float32 first: no way back
            work.to(precision)
            if precision not in self.rates:
                self.rates[precision] = ceiling(DTYPES[precision], self.device)
            plain: dict[tuple[Way, int], Timed] = {}
            for way in self.ways:
                for clients in options.clients:
                    if self.over(name, precision, *way, f"M={clients}"):
                        continue
                    key = way.plain, min(clients, options.plain_clients)
                    if not options.skip_plain and key not in plain:
                        plain[key] = time_plain(work, *key, options)
                    ours = time_passes(work, way, clients, options)
                    self.add(Case(name, clients, precision, way), plain.get(key), ours, differences.get(way))

    def add(self, case: Case, plain: Timed | None, ours: Timed, difference: float | None) -> None:
        rate, plain_ms = self.rates[case.precision], plain.ms * case.clients if plain else None
        row = Row(
            model=case.model,
            clients=case.clients,
            batch=SHAPES[case.model].batch,
            length=SHAPES[case.model].length,
            precision=case.precision,
            method=case.way.method,
            hypergradient_mode=case.way.hypergradient_mode,
            plain_ms=plain_ms,
            ours_ms=ours.ms,
            ratio=plain_ms / ours.ms if plain_ms else None,
            peak_gb=ours.peak,
            ceiling_share=ours.flops / (ours.ms / 1000) / rate,
            max_loss_difference=difference,
            plain_peak_gb=plain.peak if plain else None,
            plain_clients_timed=plain.clients if plain else 0,
            clients_per_pass=ours.clients,
            ceiling_tflops=rate / 1e12,
            machine=machine(self.device),
            versions=versions("torch", "transformers", "peft"),
        )
        self.rows.append(row)
        print(line(row), flush=True)
        if self.options.json:  # after every case: a run that is cut short keeps what it has
            self.options.json.write_text(json.dumps([asdict(r) for r in self.rows], indent=1) + "\n")

    def close(self) -> None:
        if self.rows:
            rates = [f"{rate / 1e12:.3g} TFLOP/s in {precision}" for precision, rate in self.rates.items()]
            print(f"{self.rows[0].machine}; {self.rows[0].versions}; square products at {', '.join(rates)}")
        for case in self.skipped:
            print(f"skipped, the budget of {self.options.budget:g} s is spent: {case}")


HEADER = (
    f"{'model':14}{'M':>5} {'precision':10}{'method':9}{'hypergradient':14}{'plain ms':>10}{'ours ms':>10}{'ratio':>7}"
    f"{'peak GB':>9}{'share':>7}{'loss diff':>11}"
)


def line(row: Row) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    passes = f"  in passes of {row.clients_per_pass}" if row.clients_per_pass < row.clients else ""
    return (
        f"{row.model:14}{row.clients:5} {row.precision:10}{row.method:9}{row.hypergradient_mode or '-':14}"
        f"{number(row.plain_ms, '.2f'):>10}{row.ours_ms:10.2f}{number(row.ratio, '.1f'):>7}"
        f"{number(row.peak_gb, '.2f'):>9}{row.ceiling_share:7.1%}{number(row.max_loss_difference, '.1e'):>11}{passes}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--clients", nargs="+", type=int)
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES))
    parser.add_argument(
        "--methods", nargs="+", default=["homlora", "pf2lora"], choices=["homlora", "pf2lora"]
    )
    parser.add_argument("--hypergradients", nargs="+", default=list(HYPERGRADIENTS), choices=HYPERGRADIENTS)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument(
        "--minilm", action="store_true", help="MiniLM's shape and texts of varied length on the CPU"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after each case")
    parser.add_argument("--repeat", type=int, default=10, help="repetitions of a case, whose median is taken")
    parser.add_argument("--sets", type=int, help="steps with different batches in one repetition")
    parser.add_argument("--skip-plain", action="store_true", help="this project alone: no check, no ratio")
    parser.add_argument(
        "--same-batches", action="store_true", help="the plain way, too, gets rows of like length together"
    )
    parser.add_argument("--compile", action="store_true", help="this project with its passes compiled")
    parser.add_argument("--plain-clients", type=int, help="clients that the plain way is timed on, at most")
    parser.add_argument(
        "--clients-per-pass", type=int, help="clients in one pass, at most; fewer where memory ends"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no case after that"
    )
    options = parser.parse_args(arguments)
    for name, value in vars(defaults(options)).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def defaults(options: argparse.Namespace) -> argparse.Namespace:
    """What is measured where the user names nothing else."""
    if options.small:
        models, clients, precisions, sets, plain = ["small-roberta", "small-gpt2"], [1, 2], list(DTYPES), 2, 2
    elif options.minilm:
        models, clients, precisions, sets, plain = ["minilm"], [1, 8], list(DTYPES), WINDOW, 2
    else:
        models = ["roberta-base", "roberta-large", "gpt2-medium", "gpt2-xl"]
        clients, precisions, sets, plain = [1, 8, 32, 128], list(DTYPES), 1, 2
    return argparse.Namespace(
        models=models, clients=clients, precisions=precisions, sets=sets, plain_clients=plain
    )


def main(arguments: list[str] | None = None) -> list[Row]:
    measurement = Measurement(parse(arguments))
    transformers.logging.set_verbosity_error()
    print(HEADER, flush=True)
    with float32_products("high" if measurement.device.type == "cuda" else "highest"):
        for name in measurement.options.models:
            measurement.model(name)
    measurement.close()
    return measurement.rows


if __name__ == "__main__":
    main()
