"""Where a local step's time goes on an accelerator, kernel by kernel.

    python benchmarks/step_profile.py --models roberta-base gpt2-medium --json profile.json

The step is timed as a run has it, recorded (`step_time.py`), then run plainly under torch's profiler: time on the
device by kind of kernel, and the longest kernels with how often each is called. What is between the recorded step's
time and the kernels' sum is launching and waiting. `--attention auto` is what a run gets; the others are torch's fused
kernels, also where a run would have ours for short texts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from both_ways import Way, our_step, set_up
from shapes import SHAPES, Workload, batches_of, necessary_flops, start
from timing import ceiling, float32_products, machine, milliseconds, versions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from pf2lora.adapters import short_attention
from pf2lora.adapters.layers import Adapted
from pf2lora.atomic import write_json
from pf2lora.engines.stepper import no_mask_while_recording
from pf2lora.run.workload import choose_device

ATTENTION: dict[str, list[SDPBackend] | None] = {
    "auto": None,  # what a run gets: ours for short texts where it applies, else torch's choice
    "torch": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}
KINDS = {  # the first that fits, by the kernel's name
    "attention": r"flash|fmha|sdpa|cudnn.*attn|attention",
    "products": r"gemm|nvjet|cutlass|xmma|splitKreduce|s16816|wgmma",
    "compiled elementwise": r"^triton_",
    "copies": r"memcpy|memset|copy|CatArray|direct_copy",
}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.I)), "other")


def kernels(step: Any, steps: int) -> dict[str, tuple[float, float]]:
    """Microseconds and calls of each kernel in one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total:
            found[event.key][0] += event.self_device_time_total / steps
            found[event.key][1] += event.count / steps
    return {name: (us, calls) for name, (us, calls) in found.items()}


def by_kind(found: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Milliseconds and calls of each kind of kernel in one step, the longest first."""
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "calls": 0.0})
    for name, (us, calls) in found.items():
        kinds[kind_of(name)]["ms"] += us / 1000
        kinds[kind_of(name)]["calls"] += calls
    return dict(sorted(kinds.items(), key=lambda item: -item[1]["ms"]))


def show(found: dict[str, tuple[float, float]], longest: int) -> None:
    print(f"  kernels {sum(us for us, _ in found.values()) / 1000:.2f} ms a step")
    for kind, of_kind in by_kind(found).items():
        print(f"  {of_kind['ms']:8.2f} ms {of_kind['calls']:6.0f} calls  {kind}")
    for name, (us, calls) in sorted(found.items(), key=lambda item: -item[1][0])[:longest]:
        print(f"    {us / 1000:8.3f} ms {calls:5.0f} x {us / calls:7.1f} us  {name[:150]}")


def copied(bind: Any) -> Any:
    def bound(layer: Adapted, *args: Any) -> None:
        bind(layer, *args)
        layer.in_place = False

    return bound


@contextmanager
def torchs_attention(backends: list[SDPBackend]) -> Iterator[None]:
    """One of these kernels of torch's, and none of ours."""
    with sdpa_kernel(backends), patch.object(short_attention, "applies", lambda *_, **__: False):
        yield


def measure(
    model: str, method: str, clients: int, attention: str, options: argparse.Namespace
) -> dict[str, Any]:
    """A row: the recorded step's time, its share of the ceiling, and, where they were asked for, its kernels."""
    device = options.device
    work = Workload(SHAPES[model], clients, device, rows=2 * SHAPES[model].batch)
    work.to("bfloat16")
    torch.compiler.reset()
    backends = ATTENTION[attention]
    way = Way(method, "difference" if method == "pf2lora" else None)
    trial = set_up(work, way, clients, compile=not options.uncompiled)
    with torchs_attention(backends) if backends else nullcontext():
        state, step = start(trial), our_step(trial)
        batches = batches_of(trial.source, range(clients), 0, trial.method.draws)

        def recorded() -> None:
            nonlocal state
            state, _ = step(state, *batches)

        ms = milliseconds(recorded, device, options.repeat)
        share = necessary_flops(trial.model, batches, way.hypergradient_mode) / ms / 1e9 / options.ceiling
        print(
            f"{model} {method} {clients} clients, {attention} attention: {ms:.2f} ms, {share:.0%}", flush=True
        )
        row = {
            **{"model": model, "method": method, "clients": clients, "attention": attention},
            **{name: getattr(options, name) for name in ("uncompiled", "copied", "tuned", "workspace")},
            **{"ms": ms, "share": share, "ceiling_tflops": options.ceiling},
        }
        if options.longest:
            first = start(trial)
            with no_mask_while_recording():  # as the recorded step is made
                trial.method.step(trial.F, first, *batches)
                found = kernels(lambda: trial.method.step(trial.F, first, *batches), 3)
            show(found, options.longest)
            row["kernels"] = by_kind(found)
    trial.model.remove()
    return row


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["roberta-base"], choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=["homlora"], choices=["homlora", "pf2lora"])
    parser.add_argument("--clients", nargs="+", type=int, default=[8])
    parser.add_argument("--attention", nargs="+", default=["auto"], choices=list(ATTENTION))
    parser.add_argument("--uncompiled", action="store_true")
    parser.add_argument("--copied", action="store_true", help="low-rank additions by baddbmm, which copies")
    parser.add_argument(
        "--tuned", action="store_true", help="let the compiler search for its kernels' shapes"
    )
    parser.add_argument(
        "--workspace", action="store_true", help="leave cuBLAS its workspace, which it clears"
    )
    parser.add_argument("--longest", type=int, default=25, help="so many kernels by name; 0: times alone")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument(
        "--json", type=Path, help="write the rows here, after each; those that are there stay"
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("no accelerator: torch sees no CUDA device")
    if options.copied:
        Adapted.bind = copied(Adapted.bind)  # type: ignore[method-assign]
    torch._inductor.config.coordinate_descent_tuning = options.tuned
    options.device = torch.device("cuda") if options.workspace else choose_device("cuda")
    with float32_products("high"):
        options.ceiling = ceiling(torch.bfloat16, options.device) / 1e12
        about = {
            "machine": machine(options.device),
            "versions": versions("torch", "transformers"),
            "day": datetime.now(UTC).date().isoformat(),
        }
        print(f"{about}; a square product {options.ceiling:.0f} TFLOP/s")
        rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
        for asked in product(options.models, options.clients, options.methods, options.attention):
            model, clients, method, attention = asked
            rows.append(measure(model, method, clients, attention, options) | about)
            if options.json:
                write_json(options.json, rows)
    return rows


if __name__ == "__main__":
    main()
