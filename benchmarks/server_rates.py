"""How far should a server's optimizer go? What is served by FedAvgM, FedAdam and FedYogi over their rates.

    python benchmarks/server_rates.py --model carry/minilm --data-dir carry/data/glue_sst2 --out server_rates.jsonl

SST-2 on a few clients of 200 rows, alike (h = 0.3) and different (h = 0.9), at two client rates. What counts is the
common adapter after an average: the clients' own steps, which `deploy` would take, hide the server's. The served test
loss over rounds tells how fast it goes. A line per finished run; runs that the file holds are not done again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from pf2lora.run.comparison import compare
from pf2lora.run.config import from_settings

TRIED: list[tuple[str, dict[str, Any]]] = [
    ("homlora", {}),
    ("fedavgm", {"momentum": 0.9, "server_lr": 0.1}),
    ("fedavgm", {"momentum": 0.5, "server_lr": 0.5}),
    ("fedavgm", {"momentum": 0.5, "server_lr": 1.0}),
    ("fedadam", {"beta1": 0.9, "server_lr": 3.0, "tau": 1.0}),  # both in units of the clients' lr
    ("fedadam", {"beta1": 0.9, "server_lr": 10.0, "tau": 1.0}),
    ("fedadam", {"beta1": 0.5, "server_lr": 3.0, "tau": 1.0}),
    ("fedadam", {"beta1": 0.5, "server_lr": 6.0, "tau": 1.0}),
]


def tried(method: str, own: dict[str, Any], lr: float) -> dict[str, Any]:
    scaled = {"server_lr", "tau"} if method in ("fedadam", "fedyogi") else set()
    return {name: value * lr if name in scaled else value for name, value in own.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--heterogeneity", type=float, nargs="+", default=[0.9, 0.3])
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3, 1e-3])
    flags = parser.parse_args()
    done = [json.loads(line) for line in flags.out.read_text().splitlines()] if flags.out.exists() else []
    for heterogeneity in flags.heterogeneity:
        for lr in flags.lr:
            for method, own in TRIED:
                what = {"h": heterogeneity, "lr": lr, "method": method, "own": own, "rounds": flags.rounds}
                if any(what.items() <= row.items() for row in done):
                    continue
                config = from_settings(
                    {
                        "model": flags.model,
                        "dataset": "sst2",
                        "data_dir": flags.data_dir,
                        "heterogeneity": heterogeneity,
                        "num_clients": flags.clients,
                        "limit": 200,
                        "test_limit": 100,
                        "max_length": 48,
                        "rounds": flags.rounds,
                        "evaluate_every": 5,
                        "validation_ratio": 0.0,
                        "batch_size": 8,
                        "lr": lr,
                        "seeds": flags.seeds,
                        "method": [method],
                        "methods": {method: tried(method, own, lr)} if own else {},
                    },
                    "server_rates",
                )
                (found,) = compare(config).methods.values()
                curves = [
                    {
                        r.round: fmean(v for v in r.served["loss"] if v is not None)
                        for r in run.rounds
                        if r.served
                    }
                    for run in found.runs
                ]
                scores = [run.served["accuracy"].mean for run in found.runs]
                row = what | {"clients": flags.clients, "accuracy": scores, "served_loss": curves}
                with flags.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
