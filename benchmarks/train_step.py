"""What a local step takes inside `pf2lora train`, not in a benchmark of its own: rows drawn, states moved, losses kept.

    python benchmarks/train_step.py --tokenizer carry/mpnet --json train_step.json
    python benchmarks/train_step.py --tokenizer carry/smollm2 --shape llama-8b --card 24 --quantization nf4 --rounds 3

A model of RoBERTa-base's shape (or `--shape`) with random weights, made here, and eight clients' files whose every row
fills its length. `--card` leaves the run so much of the device's memory: what does not fit is for the run to see to. A
row is a whole run by the command line's own function. Its milliseconds are those of the median round by its
steps, without the first one, in which they are compiled and recorded; what validation rows are asked is no step's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES
from timing import ceiling, float32_products, machine, take_all_but, versions
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from pf2lora.atomic import write_json
from pf2lora.cli.show import quiet_libraries
from pf2lora.run.api import run
from pf2lora.run.config import from_settings
from pf2lora.run.workload import choose_device

WORDS = ["good", "bad", "film", "plot"]


def make_model(folder: Path, shape: str, tokenizer: str, device: torch.device) -> str:
    torch.manual_seed(0)
    words, config = AutoTokenizer.from_pretrained(tokenizer), copy.deepcopy(SHAPES[shape].config)
    config.vocab_size = max(config.vocab_size, len(words))
    kind = AutoModelForCausalLM if SHAPES[shape].causal else AutoModel
    with device:
        kind.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def make_clients(folder: Path, shape: str, clients: int, rows: int) -> str:
    """Files with a row of more words than it has tokens, each with a label, or, for a language model, to be learned."""
    random, count = np.random.default_rng(0), 200 if SHAPES[shape].length <= 128 else 2 * SHAPES[shape].length
    for k in range(clients):
        texts = (" ".join(random.choice(WORDS, count)) for _ in range(rows))
        if SHAPES[shape].causal:
            lines = [{"prompt": "good", "target": text} for text in texts]
        else:
            lines = [{"text": text, "label": f"{i % 2}"} for i, text in enumerate(texts)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"client-{k}.jsonl").write_text(text, encoding="utf8")
    return str(folder / "*.jsonl")


def measure(model: str, files: str, method: str, given: argparse.Namespace) -> dict[str, Any]:
    """A whole run, and its rounds' own times."""
    settings: dict[str, Any] = {
        **{"model": model, "clients": [files], "method": [method], "rounds": given.rounds},
        **{"max_length": SHAPES[given.shape].length, "batch_size": SHAPES[given.shape].batch},
        **{"evaluate_every": given.rounds, "device": given.device, "compile": not given.uncompiled},
        **{"quantization": given.quantization},
    }
    if SHAPES[given.shape].causal:
        settings |= {"task": "generation", "max_new_tokens": 0}
    with tempfile.TemporaryDirectory() as folder:
        result = run(from_settings(settings, "train_step.py"), Path(folder) / "run")
    (found,) = next(iter(result.methods.values())).runs
    steps = result.config["training"]["steps"]
    return {
        "shape": given.shape,
        "method": method,
        "clients": given.clients,
        "compiled": not given.uncompiled,
        "quantization": given.quantization,
        "card_gb": given.card,
        "ms_a_step": 1000 * statistics.median(r.seconds for r in found.rounds[1:]) / steps,
        "first_round_seconds": found.rounds[0].seconds,
        "rounds": given.rounds,
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="a hub name or a folder")
    parser.add_argument("--shape", default="roberta-base", choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=["homlora", "pf2lora"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20, help="of 10 steps")
    parser.add_argument("--uncompiled", action="store_true")
    parser.add_argument("--quantization", default="none", choices=["none", "nf4", "int8"])
    parser.add_argument("--card", type=float, metavar="GB", help="as if the device had no more memory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the rows here, after each")
    given = parser.parse_args(argv)
    quiet_libraries()
    device = choose_device(given.device)
    with float32_products("high"):
        most = ceiling(torch.bfloat16, device) / 1e12
    about = {
        "machine": machine(device),
        "versions": versions("torch", "transformers"),
        "ceiling_tflops": most,
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "files").mkdir()
        model = make_model(place / "model", given.shape, given.tokenizer, device)
        files = make_clients(
            place / "files", given.shape, given.clients, 400 if SHAPES[given.shape].batch > 4 else 60
        )
        torch.cuda.empty_cache()
        taken = take_all_but(given.card, device) if given.card else None  # held until the runs are over
        for method in given.methods:
            rows.append(measure(model, files, method, given) | about)
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                write_json(given.json, rows)
    del taken
    return rows


if __name__ == "__main__":
    main()
