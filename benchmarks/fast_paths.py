"""200 steps of a real task with all fast paths on, beside the plain path.

SST-2, PF2LoRA. The plain path is float32, the exact hypergradient, every step as it is written. The fast ones are the
difference hypergradient, recorded steps and (on CUDA) compiled passes, in float32 and in bfloat16. All see the same
rows in the same order. Reported: how far the loss curves part, and the served accuracy over the seeds of either path.

PYTHONPATH=src python benchmarks/fast_paths.py --model carry/mpnet --json fast_paths.json

`--read FILE...` trains nothing: it compares the paths that such files hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import transformers
from package_runs import DATA
from timing import machine, versions

from pf2lora.engines.local import train
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.evaluation import measure, models_in_use, over_clients
from pf2lora.run.set_up import set_up
from pf2lora.run.workload import Workload

PATHS: dict[str, dict[str, Any]] = {
    "plain": {"precision": "float32", "hypergradient_mode": "exact", "graphs": False, "compile": False},
    "fast, float32": {"precision": "float32", "hypergradient_mode": "difference", "graphs": True},
    "fast": {"precision": "bfloat16", "hypergradient_mode": "difference", "graphs": True},
}


def run(workload: Workload, seed: int) -> dict[str, Any]:
    """Every step's loss, averaged over the clients, and the served accuracy at the end."""
    trial = set_up(workload, "pf2lora", seed)
    started, losses = time.perf_counter(), []
    rounds = train(
        trial.method,
        trial.F,
        trial.state,
        trial.source,
        trial.schedule,
        device=workload.device,
        stepper=trial.stepper,
    )
    for done in rounds:
        losses += done.stats.loss.mean(1).tolist()
    seconds = time.perf_counter() - started
    scores = measure(trial, models_in_use(trial, done.served, done.number)).scores["accuracy"]
    trial.model.remove()
    accuracy = over_clients(scores, workload.task.metrics["accuracy"])
    return {
        "seed": seed,
        "losses": losses,
        "accuracy": accuracy.mean,
        "per_client": accuracy.per_client,
        "seconds": round(seconds, 1),
    }


def line(path: str, one: dict[str, Any], plain: list[dict[str, Any]]) -> str:
    """A run in words: its losses, its score, and how far its loss curve is from the plain path's with the same seed."""
    first, last = one["losses"][0], statistics.mean(one["losses"][-10:])
    text = f"{path}, seed {one['seed']}: loss {first:.4f} → {last:.4f} (the last 10 steps)"
    text += f", accuracy {one['accuracy']:.4f}"
    beside = [other["losses"] for other in plain if other["seed"] == one["seed"]]
    if path == "plain" or not beside:
        return text
    apart = [abs(a - b) for a, b in zip(beside[0], one["losses"])]
    return f"{text}; losses apart by {max(apart):.1e} at most, {statistics.mean(apart):.1e} on average"


def print_scores(found: dict[str, list[dict[str, Any]]]) -> None:
    for path, runs in found.items():
        scores = [one["accuracy"] for one in runs]
        print(f"{path}: accuracy {statistics.mean(scores):.4f}, from {min(scores):.4f} to {max(scores):.4f}")


def read(files: list[Path]) -> None:
    """What the files' runs show together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for path, runs in json.loads(file.read_text())["paths"].items():
            found.setdefault(path, []).extend(runs)
    for path, runs in found.items():
        for one in runs:
            print(line(path, one, found.get("plain", [])))
    print_scores(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=str(DATA / "glue_sst2"), help="folder of GLUE's SST-2")
    parser.add_argument("--model", help="a model folder (benchmarks/models.py makes them)")
    parser.add_argument("--read", nargs="+", type=Path, help="only compare what these files hold")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--heterogeneity", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--client-lr", type=float, default=0.03)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path, help="write everything here, after each run")
    given = parser.parse_args()
    if given.read:
        return read(given.read)
    if not given.model:
        parser.error("--model FOLDER is what to train (or --read FILE...)")
    transformers.logging.set_verbosity_error()
    base = {
        "model": given.model,
        "rounds": given.rounds,
        "lr": given.lr,
        "client_lr": given.client_lr,
        "validation_ratio": 0,
        "compile": not given.no_compile,
        "dataset": "sst2",
        "data_dir": given.data,
        "num_clients": given.clients,
        "heterogeneity": given.heterogeneity,
    }
    found: dict[str, list[dict[str, Any]]] = {}
    settings = {k: str(v) for k, v in vars(given).items()}
    for path in given.paths:
        workload = prepare(from_settings(base | PATHS[path], path))
        settings |= {"machine": machine(workload.device), "versions": versions("torch", "transformers")}
        for seed in range(given.seeds):
            one = run(workload, seed)
            found.setdefault(path, []).append(one)
            print(f"{line(path, one, found.get('plain', []))}, {one['seconds']} s", flush=True)
            if given.json:
                given.json.write_text(json.dumps({"settings": settings, "paths": found}, indent=1) + "\n")
        del workload
        gc.collect()
    print_scores(found)
    print(f"{settings['machine']}; {settings['versions']}")


if __name__ == "__main__":
    main()
