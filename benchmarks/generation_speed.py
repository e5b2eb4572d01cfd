"""Beam search for 8 clients: all their adapters in one batched call against client by client.

PYTHONPATH=src python benchmarks/generation_speed.py --model carry/smollm2 --out speed.json

Every client continues the same number of prompts. The lengths are fixed (no end-of-text token is generated), so both
ways write exactly the same number of tokens, and their texts are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from package_runs import DATA
from timing import machine, synchronize
from transformers.utils import logging

from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.data.loading import load_clients
from pf2lora.data.settings import DataSettings
from pf2lora.run.workload import DTYPES
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation


def timed(
    function: Callable[[], list[list[str]]], device: torch.device, repeats: int
) -> tuple[float, list[list[str]]]:
    """The median seconds of a call, after one to warm up."""
    texts, seconds = function(), []
    for _ in range(repeats):
        started = time.perf_counter()
        texts = function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), texts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--precision", default="float32", choices=list(DTYPES))
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--prompts", type=int, default=4, help="prompts of each client")
    options.add_argument("--beams", type=int, default=10)
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    logging.disable_progress_bar()

    device = torch.device(given.device)
    settings = GenerationSettings(max_length=128, beams=given.beams, max_new_tokens=given.max_new_tokens)
    task = Generation(load_tokenizer(str(given.model)), settings, generation_batch=given.prompts)
    base = task.load_model(str(given.model), DTYPES[given.precision])
    base.to(device)  # type: ignore[arg-type]
    base.generation_config.min_new_tokens = given.max_new_tokens
    model = TwoLevelModel(base, AdapterSpec(rank=4, client_rank=2))
    torch.manual_seed(0)
    x, y = (
        torch.randn(given.clients, layout.size).to(device) * 0.02
        for layout in (model.common_layout, model.personal_layout)
    )
    data = DataSettings(dataset="e2e", data_dir=str(given.data / "e2e"), num_clients=given.clients)
    clients = load_clients(settings, data, seed=0)
    prompts = [[row.prompt for row in client.test[: given.prompts]] for client in clients]

    def together() -> list[list[str]]:
        return task.generate(model, x, y, prompts)

    def one_by_one() -> list[list[str]]:
        each = range(given.clients)
        return [task.generate(model, x[k : k + 1], y[k : k + 1], [prompts[k]])[0] for k in each]

    batched, texts = timed(together, device, given.repeats)
    apart, alone = timed(one_by_one, device, given.repeats)
    same = sum(a == b for ours, theirs in zip(texts, alone) for a, b in zip(ours, theirs))
    result = {
        "device": machine(device),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()},
        "batched_seconds": batched,
        "one_by_one_seconds": apart,
        "ratio": apart / batched,
        "same_texts": f"{same} of {given.clients * given.prompts}",
    }
    print(json.dumps(result, indent=1))
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
