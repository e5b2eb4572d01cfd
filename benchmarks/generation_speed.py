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
from transformers.utils import logging

from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.tasks.generation.e2e import load_e2e
from pf2lora.tasks.generation.task import Decoding, Generation


def timed(
    function: Callable[[], list[list[str]]], device: str, repeats: int
) -> tuple[float, list[list[str]]]:
    """The median seconds of a call, after one to warm up."""
    texts, seconds = function(), []
    for _ in range(repeats):
        started = time.perf_counter()
        texts = function()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), texts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, default=Path("/work/shared/data"))
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--prompts", type=int, default=4, help="prompts of each client")
    options.add_argument("--beams", type=int, default=10)
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    logging.disable_progress_bar()

    decoding = Decoding(beams=given.beams, max_new_tokens=given.max_new_tokens)
    task = Generation(
        load_tokenizer(str(given.model)), max_length=128, decoding=decoding, generation_batch=given.prompts
    )
    base = task.load_model(str(given.model), getattr(torch, given.precision))
    base.to(given.device)
    base.generation_config.min_new_tokens = given.max_new_tokens
    model = TwoLevelModel(base, AdapterSpec(rank=4, client_rank=2))
    torch.manual_seed(0)
    x, y = (torch.randn(given.clients, layout.size).to(given.device) * 0.02 for layout in (model.x, model.y))
    prompts = [
        [r.prompt for r in c.test[: given.prompts]] for c in load_e2e(given.data / "e2e", given.clients)
    ]

    def together() -> list[list[str]]:
        return task.generate(model, x, y, prompts)

    def one_by_one() -> list[list[str]]:
        each = range(given.clients)
        return [task.generate(model, x[k : k + 1], y[k : k + 1], [prompts[k]])[0] for k in each]

    batched, texts = timed(together, given.device, given.repeats)
    apart, alone = timed(one_by_one, given.device, given.repeats)
    same = sum(a == b for ours, theirs in zip(texts, alone) for a, b in zip(ours, theirs))
    name = (
        torch.cuda.get_device_name() if given.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    )
    result = {
        "device": name,
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
