"""Would float8 products of the frozen base model be safe and faster? On an H100 or later.

Every projection of the base model's layers is multiplied in e4m3, forward and back: weights with a scale for each
output (or input, on the way back), activations and gradients with one for each row; the product is in bfloat16.
Adapters, attention, norms and the head are as in bfloat16.

- losses: `fast_paths.py`'s 200 steps of SST-2 in float8, beside the recorded ones of the plain float32 path and of
  bfloat16 (`--beside`): safe if they are no further from the plain path than bfloat16's.
- times: a compiled and recorded local step of 8 clients in bfloat16 and in float8.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from both_ways import Way, our_step, set_up
from fast_paths import PATHS, run
from package_runs import DATA
from shapes import SHAPES, Workload, batches_of, start
from timing import machine, milliseconds, peak_gb, start_memory, versions
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from pf2lora.atomic import write_json
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.workload import choose_device

KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of numbers in float8, and the scale `(rows, 1)` of each."""
    scale = rows.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (rows.float() / scale).to(KIND), scale


class Float8Linear(nn.Linear):
    """A frozen linear layer whose products are in float8."""

    forward_weight: Tensor  # (out, in)
    back_weight: Tensor  # (in, out): the second factor of a product must lie column by column
    forward_scale: Tensor  # (out, 1)
    back_scale: Tensor  # (in, 1)

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        weight = layer.weight.detach()
        weight = weight.T if isinstance(layer, Conv1D) else weight
        super().__init__(weight.shape[1], weight.shape[0], device="meta")
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)  # its dtype is the model's
        self.bias = layer.bias
        for name, matrix in (("forward", weight.contiguous()), ("back", weight.T.contiguous())):
            codes, scale = rounded(matrix)
            self.register_buffer(f"{name}_weight", codes)
            self.register_buffer(f"{name}_scale", scale)

    def forward(self, u: Tensor) -> Tensor:
        product: Tensor = Product.apply(
            u, self.forward_weight, self.forward_scale, self.back_weight, self.back_scale
        )
        return product if self.bias is None else product + self.bias


def multiplied(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`rows @ weight.T` of rows that are rounded first."""
    flat = rows.reshape(-1, rows.shape[-1])
    codes, own = rounded(flat)
    if rows.device.type == "cuda":
        found = torch._scaled_mm(codes, weight.t(), own, scale.t(), out_dtype=torch.bfloat16)
    else:  # to try the script without a device
        found = (codes.float() * own) @ (weight.float() * scale).t()
    return found.to(rows.dtype).view(*rows.shape[:-1], weight.shape[0])


class Product(torch.autograd.Function):
    """`u Wᵀ` in float8, and its gradient for u: the weights have none."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, weight: Tensor, scale: Tensor, back: Tensor, back_scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(back, back_scale)
        return multiplied(u, weight, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return multiplied(gradient, *ctx.saved_tensors), None, None, None, None


def in_float8(model: nn.Module) -> None:
    """The projections of the model's layers; embeddings, norms and the head stay as they are."""
    lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, Conv1D)) and name.startswith(tuple(lists)):
            model.set_submodule(name, Float8Linear(module))


def losses(given: argparse.Namespace) -> dict[str, Any]:
    """200 steps in float8, and how far they are from those of other paths."""
    settings = PATHS["fast"] | {
        "model": given.model,
        "rounds": given.rounds,
        "lr": 1e-3,
        "client_lr": 0.03,
        "validation_ratio": 0,
        "compile": not given.no_compile,
        "dataset": "sst2",
        "data_dir": given.data,
        "num_clients": 8,
        "heterogeneity": 0.5,
    }
    workload = prepare(from_settings(settings, "float8"))
    if not given.control:
        in_float8(workload.base)
    before: dict[tuple[str, int], list[float]] = {}
    for file in given.beside:
        for path, runs in json.loads(file.read_text())["paths"].items():
            before |= {(path, one["seed"]): one["losses"] for one in runs}
    found: dict[str, Any] = {"runs": []}
    for seed in range(given.seeds):
        one = run(workload, seed)
        apart = {}
        for path in ("plain", "fast"):
            if (path, seed) in before:
                differences = [abs(a - b) for a, b in zip(before[path, seed], one["losses"])]
                apart[path] = [max(differences), statistics.mean(differences)]
        found["runs"].append(one | {"apart": apart})
        text = f"seed {seed}: accuracy {one['accuracy']:.4f}, apart (most, mean) {apart}, {one['seconds']} s"
        print(text, flush=True)
    return found


def times(names: list[str], clients: int, *, compiled: bool) -> list[dict[str, Any]]:
    """A local step of HOMLoRA in both."""
    device = choose_device("auto")
    rows = []
    for name in names:
        shape = SHAPES[name]
        start_memory(device)
        work = Workload(shape, clients, device, rows=2 * shape.batch)
        if work.precision != "bfloat16":
            work.to("bfloat16")
        for precision in ("bfloat16", "float8"):
            if precision == "float8":
                in_float8(work.base)
            rows.append({"model": name, "precision": precision} | timed(work, clients, compiled=compiled))
            print(json.dumps(rows[-1]), flush=True)
        del work
    return rows


def timed(work: Workload, clients: int, *, compiled: bool) -> dict[str, Any]:
    torch.compiler.reset()
    trial = set_up(work, Way("homlora", None), clients, compile=compiled)
    state, step = start(trial), our_step(trial)
    batches = batches_of(trial.source, range(clients), 0, trial.method.draws)
    state, stats = step(state, *batches)
    loss = float(stats.loss.mean())

    def again() -> None:
        nonlocal state
        state, _ = step(state, *batches)

    ms = milliseconds(again, work.device, 10)
    trial.model.remove()
    return {"ms": ms, "loss": loss, "peak_gb": peak_gb(work.device)}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder; without one, only times")
    parser.add_argument("--data", default=str(DATA / "glue_sst2"), help="folder of GLUE's SST-2")
    results = Path(__file__).parent / "results"
    beside = [results / "fast_paths_float32.json", results / "fast_paths_bf16.json"]
    parser.add_argument(
        "--beside", nargs="*", type=Path, default=beside, help="recorded paths of fast_paths.py"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shapes", nargs="*", default=["roberta-base", "llama-1.2b"], choices=list(SHAPES))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--control", action="store_true", help="the losses in bfloat16 once more")
    parser.add_argument("--json", type=Path, help="write everything here")
    given = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    device = choose_device("auto")
    found: dict[str, Any] = {"machine": machine(device), "versions": versions("torch", "transformers")}
    found["times"] = times(given.shapes, given.clients, compiled=not given.no_compile)
    if given.model:
        found["losses"] = losses(given)
    if given.json:
        write_json(given.json, found)
    return found


if __name__ == "__main__":
    main()
