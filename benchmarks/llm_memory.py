"""Memory and time of a local step on large language models, one JSON line for each row.

Random weights of well-known shapes (`shapes.py`), drawn on the device in bfloat16; 8 clients. Rows differ by method, by
whether layers are run again for the gradient (`checkpointing`), by whether they are compiled, by the bits of the frozen
base model, and by how many clients share a pass: `ms` is of one pass, of which a step takes as many as it needs. The
plain way beside them is PEFT's, client by client (`plain_peft.py`): two clients are timed, and multiplied.

`peak_gb` is the most that was in use on the device, the base model included, `reserved_gb` what a card must have for
it. The share is that of the machine's product of two large square matrices, counting necessary arithmetic alone: what
is computed again is not counted. A row that does not fit says so in `error`, and the next one begins.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from both_ways import Way, our_step, set_up, time_plain
from shapes import SHAPES, Workload, batches_of, necessary_flops, start
from timing import ceiling, machine, milliseconds, peak_gb, start_memory, versions

from pf2lora.adapters.quantised import held_bytes, quantise
from pf2lora.run.workload import DTYPES, choose_device

HOMLORA, PF2LORA = Way("homlora", None), Way("pf2lora", "difference")
MODELS = ("llama-8b", "llama-1.2b", "gpt2-medium")
TINY = ("small-llama", "small-gpt2")


class Case(NamedTuple):
    """One row; the plain way has its method alone."""

    way: Way
    bits: str = "none"
    checkpointing: str = "off"
    compiled: bool = False
    plain: bool = False
    per_pass: int | None = None  # all


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What matters most first; a base model is rounded once, so what is rounded comes last."""
    compiled = [True, False] if options.compile == "both" else [options.compile == "on"]
    for bits in options.bits:
        for checkpointing in options.checkpointing if bits == "none" else ["on"]:
            for fast in compiled:
                for way in (PF2LORA, HOMLORA):
                    if checkpointing == "off" and options.per_pass and bits == "none":
                        yield Case(way, bits, checkpointing, fast, per_pass=options.per_pass)
                    yield Case(way, bits, checkpointing, fast)
        if bits == "none" and not options.skip_plain:
            yield Case(HOMLORA, plain=True)
            yield Case(PF2LORA.plain, plain=True)


def measure(work: Workload, case: Case, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """The figures of a row."""
    clients = case.per_pass or options.clients
    if case.plain:
        timed = time_plain(work, case.way, min(2, clients), options)
        trial = set_up(work, case.way, clients)
        batches = batches_of(trial.source, range(clients), 0, trial.method.draws)
        flops, ms, found = (
            necessary_flops(trial.model, batches, case.way.hypergradient_mode),
            timed.ms * clients,
            {},
        )
        trial.model.remove()
    else:
        torch.compiler.reset()
        trial = set_up(work, case.way, clients, checkpointing=case.checkpointing, compile=case.compiled)
        try:
            state, step = start(trial), our_step(trial)
            batches = batches_of(trial.source, range(clients), 0, trial.method.draws)
            losses = []

            def run() -> None:
                nonlocal state
                state, stats = step(state, *batches)
                losses.append(stats.loss)

            began = time.perf_counter()
            run()
            first = float(losses[0].mean())  # waits for the device
            found = {"first_loss": first, "first_step_s": round(time.perf_counter() - began, 1)}
            ms = milliseconds(run, work.device, options.repeat)
            flops = necessary_flops(trial.model, batches, case.way.hypergradient_mode)
        finally:
            trial.model.remove()
    share = flops / (ms / 1000) / rate
    return {
        "ms": round(ms, 2),
        "share": float(f"{share:.4g}"),
        "tokens_per_s": round(tokens(batches) / ms * 1000),
    } | found


def tokens(batches: list[Any]) -> int:
    """What a step reads."""
    return sum(batch.tensors["input_ids"].numel() for batch in batches)


def rows_of(model: str, device: torch.device, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    start_memory(device)
    shape = SHAPES[model]
    work = Workload(shape, options.clients, device, rows=2 * shape.batch)
    if device.type == "cuda" and work.precision != "bfloat16":
        work.to("bfloat16")
    rate = ceiling(DTYPES[work.precision], device)
    bits = "none"
    for case in cases(options):
        if time.perf_counter() - options.started > options.budget:
            return
        if case.bits != bits:
            quantise(work.base, case.bits, device)
            bits = case.bits
        start_memory(device)
        row: dict[str, Any] = {
            "model": model,
            "clients": options.clients,
            "batch": shape.batch,
            "length": shape.length,
            "method": case.way.method,
            "second_order": case.way.hypergradient_mode,
            "plain": case.plain,
            "base": work.precision if bits == "none" else bits,
            "checkpointing": case.checkpointing,
            "compiled": case.compiled,
            "clients_per_pass": 1 if case.plain else case.per_pass or options.clients,
            "base_gb": round(held_bytes(work.base) / 1e9, 2),
            "ceiling_tflops": round(rate / 1e12, 3),
        }
        try:
            row |= measure(work, case, options, rate)
        except (RuntimeError, ValueError) as error:  # out of memory is one of them
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        peak = peak_gb(device)
        if peak is not None:
            row |= {
                "peak_gb": round(peak, 2),
                "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
            }
        yield row


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--bits", nargs="+", default=["none", "nf4"], choices=["none", "nf4", "int8"])
    parser.add_argument("--checkpointing", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument(
        "--per-pass", type=int, default=2, help="without checkpointing, passes of so many clients, too"
    )
    parser.add_argument("--compile", default="both", choices=["both", "on", "off"])
    parser.add_argument("--skip-plain", action="store_true", help="this project alone")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of a row, whose median is taken")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="begin no row after that"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file, too")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, not compiled")
    options = parser.parse_args(arguments)
    options.models = options.models or (TINY if options.tiny else MODELS)
    if options.tiny:
        options.compile = "off"
    options.sets, options.same_batches, options.started = 1, False, time.perf_counter()
    return options


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    options = parse(arguments)
    transformers.logging.set_verbosity_error()
    device = choose_device("cpu" if options.tiny else "auto")
    about = {"machine": machine(device), "versions": versions("torch", "transformers", "peft")}
    found = []
    for model in options.models:
        for row in rows_of(model, device, options):
            found.append(row | about)
            print(json.dumps(found[-1]), flush=True)
            if options.json:
                with options.json.open("a", encoding="utf8") as file:
                    file.write(json.dumps(found[-1]) + "\n")
    return found


if __name__ == "__main__":
    main()
