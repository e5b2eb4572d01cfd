"""What fewer bits on a federation's wire do to the score: float32, bfloat16 and int8, with the same seeds.

    python benchmarks/wire_score.py [--method homlora] [--lr 0.0001] [--seeds 3]

Sites and server in one process, without FLARE, on the small world of `small_texts.py` (CPU). For each wire: the served
accuracy and loss at the end, the mean over sites and seeds; how far x is from float32's, as a part of what x learned;
and the bytes of x that a site sends and gets in a round, after the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import small_texts
from small_federation import Small, write_policy
from torch import Tensor

from pf2lora.federation.protocol.messages import decode
from pf2lora.federation.protocol.plan import WIRES, Plan
from pf2lora.run.config import from_settings


def world(root: Path, sites: int, rows: int, seed: int) -> dict[str, Path]:
    """A file for each site, its rows beside it: some to train on, and as many to test on."""
    model = small_texts.write_model(root / "model")
    train = small_texts.write_clients(root / "train", sites, rows, seed)
    test = small_texts.write_clients(root / "test", sites, rows, seed + 1000)
    found = {}
    for k, (one, other) in enumerate(zip(train, test)):
        folder = root / "sites" / f"site-{k + 1}"
        folder.mkdir(parents=True)
        (folder / "site.toml").write_text(
            f'model = "{model}"\nstate = "{root / "state" / folder.name}"\ndevice = "cpu"\n'
            f'[data]\nclients = ["{one}"]\ntest = ["{other}"]\nvalidation_ratio = 0.0\n'
        )
        write_policy(folder)
        found[folder.name] = folder / "site.toml"
    return found


def tensor_bytes(data: bytes) -> int:
    return sum(t.nbytes for t in decode(data).tensors.values())


def run(root: Path, wire: str, args: argparse.Namespace, seed: int) -> tuple[dict[str, Any], Tensor, Tensor]:
    """One run's figures, its x, and the x that all began with."""
    files = world(root, args.sites, args.rows, seed)
    settings = {
        "method": [args.method],
        "rounds": args.rounds,
        "steps": args.steps,
        "batch_size": 8,
        "rank": 4,
        "lr": args.lr,
        "client_lr": args.lr,
        "seed": seed,
    }
    plan = Plan.of(from_settings(settings), "wire", tuple(files), ("negative", "positive"), wire=wire)
    small = Small(plan, root, files)
    small.greet()
    while not small.coordinator.over:
        if small.coordinator.done == args.rounds - 1:
            down = small.coordinator.requests(list(files), set())
        small.round()
    up = [data for _, data in small.messages if decode(data).round == args.rounds]
    small.coordinator.finish(small.ask(small.coordinator.finish_requests(list(files))))
    final = json.loads((root / "server" / "final.json").read_text())
    served = [told["served"] for told in final.values()]
    setup = next(iter(small.setups.values()))
    assert small.coordinator.common is not None
    figures = {
        "accuracy": mean(s["accuracy"] / s["rows"] for s in served),
        "loss": mean(s["loss"] / s["rows"] for s in served),
        "up": mean(tensor_bytes(data) for data in up),
        "down": mean(tensor_bytes(data) for data in down.values()),
    }
    return figures, small.coordinator.common, setup.method.send(setup.initial, 1)[1][0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="pf2lora")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(
        f"{args.method}, lr {args.lr:g}, {args.sites} sites, {args.rounds} rounds of {args.steps} steps, ",
        end="",
    )
    print(f"{args.seeds} seeds")
    print(
        "| wire | accuracy | loss | distance of x | bytes up | bytes down |\n| --- | --- | --- | --- | --- | --- |"
    )
    exact: dict[int, Tensor] = {}
    for wire in WIRES:
        figures, apart = [], []
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as scratch:
                found, x, began = run(Path(scratch), wire, args, seed)
            figures.append(found)
            exact.setdefault(seed, x)
            apart.append(float((x - exact[seed]).norm() / (exact[seed] - began).norm()))
        of = {name: [f[name] for f in figures] for name in figures[0]}
        spread = stdev(of["accuracy"]) if args.seeds > 1 else 0.0
        print(
            f"| {wire} | {mean(of['accuracy']):.2%} ± {spread:.2%} | {mean(of['loss']):.4f} | {mean(apart):.2%} | "
            f"{mean(of['up']):,.0f} | {mean(of['down']):,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
