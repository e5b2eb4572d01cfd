"""How many tokens a second `pf2lora serve` writes: requests of different clients in the same passes, and one at a time.

    PYTHONPATH=src python benchmarks/serving_speed.py --models gpt2-medium llama-1.2b --clients 1 8 16

Random weights and adapters, greedy, no HTTP: what is timed is the running batch (serve/batch.py), prompts included.
Every client asks once. One at a time is one client's request after another's, each in passes of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from shapes import SHAPES, random_model
from timing import machine, milliseconds

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.serve.batch import Row, RunningBatch
from pf2lora.tasks.generation.sampling import Sampler


def write(batch: RunningBatch, rows: Sequence[Row], tokens: int) -> list[list[int]]:
    """The rows' tokens, from their prompts on; the batch is empty before and after."""
    batch.admit(rows)
    found = [[row.last] for row in rows]
    for _ in range(tokens - 1):
        batch.step()
        for row, own in zip(rows, found):
            own.append(row.last)
    batch.clear()
    return found


def measure(
    name: str, clients: int, prompt: int, tokens: int, device: torch.device, repeat: int
) -> dict[str, object]:
    shape = SHAPES[name]
    model = TwoLevelModel(random_model(shape, device), AdapterSpec())
    random = torch.Generator().manual_seed(0)
    layouts = model.common_layout, model.personal_layout
    adapters = {
        str(k): tuple(0.02 * torch.randn(1, each.size, generator=random) for each in layouts)
        for k in range(clients)
    }
    batch = RunningBatch(model, lambda of: (adapters[of][0], adapters[of][1]), padding=0)
    prompts = torch.randint(3, shape.config.vocab_size, (clients, prompt), generator=random).tolist()

    def rows() -> list[Row]:
        return [Row(str(k), prompts[k], Sampler(0)) for k in range(clients)]

    def together() -> list[list[int]]:
        return write(batch, rows(), tokens)

    def apart() -> list[list[int]]:
        return [write(batch, [row], tokens)[0] for row in rows()]

    same = sum(a == b for a, b in zip(together(), apart()))
    written = clients * tokens
    seconds = {way.__name__: milliseconds(way, device, repeat) / 1000 for way in (together, apart)}
    return {
        "model": name,
        "clients": clients,
        "precision": str(shape.dtype).removeprefix("torch."),
        "prompt": prompt,
        "tokens": tokens,
        "together_tokens_per_second": round(written / seconds["together"], 1),
        "apart_tokens_per_second": round(written / seconds["apart"], 1),
        "ratio": round(seconds["apart"] / seconds["together"], 2),
        "same_texts": f"{same} of {clients}",
        "device": machine(device),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--models", nargs="+", default=["gpt2-medium"], choices=list(SHAPES))
    options.add_argument("--clients", type=int, nargs="+", default=[8])
    options.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    options.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--json", type=Path, help="the rows as a file")
    given = options.parse_args(arguments)
    found = []
    for name in given.models:
        for clients in given.clients:
            device = torch.device(given.device)
            found.append(measure(name, clients, given.prompt, given.tokens, device, given.repeat))
            print(json.dumps(found[-1]))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
