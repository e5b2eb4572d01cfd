"""Small runs of every method on every task, boiled down to numbers that a rebuild must not change.

`python tests/helpers/pinned_runs.py` writes pinned_runs.json anew, with names of methods for these alone; a commit that
changes a number says which and why.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from broken_runs import size_of_step
from little_world import make_world
from safetensors.torch import load_file
from small_federation import Small, make_plan, write_site_file
from tiny_tasks import write_generation_task, write_question_task

from pf2lora import federate
from pf2lora.methods import METHODS, resolved
from pf2lora.run import costs

RECORDED = Path(__file__).with_name("pinned_runs.json")
TASKS = ("classification", "question-answering", "generation")
WAYS = ("all at once", "one a pass", "federation")
NAMES = ("north", "south", "west")
SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "steps": 2,
    "batch_size": 4,
    "rank": 4,
    "client_rank": 2,
    "lr": 0.01,
    "client_lr": 0.05,
    "validation_ratio": 0,
    "participation": 0.67,
    "methods": {
        "per-fedavg": {"adaptation_lr": 0.05},
        "fedavgm": {"momentum": 0.9},
        "fedadam": {"beta1": 0.9},
        "fedyogi": {"beta1": 0.9},
    },
}
AUTO = "all at once, auto"  # sizes and what is deployed are found on validation rows
VALIDATED: dict[str, Any] = {
    "rounds": 4,
    "steps": 6,
    "batch_size": 8,
    "lr": 0.006,
    "client_lr": "auto",
    "validation_ratio": 0.2,
}  # two clients deploy what they are served, the third its own steps
OF_TASK: dict[str, dict[str, Any]] = {
    "classification": {"max_length": 16},
    "question-answering": {"max_length": 64, "stride": 8},
    "generation": {"max_length": 64, "max_new_tokens": 6, "beams": 2, "no_repeat_ngram": 0},
}
CASES = [
    (method, task, way)
    for method in METHODS.own
    for task in TASKS
    for way in WAYS
    if not (method == "centralized" and way == "federation")  # it pools everybody's data
] + [("pf2lora", "classification", AUTO)]


def name_of(method: str, task: str, way: str) -> str:
    return f"{method}, {task}, {way}"


def write_task(task: str, folder: Path) -> tuple[Path, list[Path]]:
    """A tiny model in a folder, and three clients' files."""
    if task == "classification":
        world = make_world(folder)
        return world.model, world.clients
    return (write_question_task if task == "question-answering" else write_generation_task)(folder, NAMES)


def run(method: str, task: str, way: str, folder: Path) -> dict[str, Any]:
    """One run's numbers: projections of its adapters, its scores, and what it sent."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # METEOR starts Java, which takes longer than the whole run, and operations are a quarter of it to count.
        with patch.dict(os.environ, PATH=""), patch.object(costs, "flops_of_step", size_of_step):
            model, files = write_task(task, folder)
            work = in_federation if way == "federation" else locally
            return work(method, task, model, files, folder, way)
    finally:
        torch.set_num_threads(threads)


def locally(method: str, task: str, model: Path, files: list[Path], folder: Path, way: str) -> dict[str, Any]:
    settings = SETTINGS | OF_TASK[task] | {"device": "cpu"}
    settings |= {"one a pass": {"clients_per_pass": 1}, AUTO: VALIDATED}.get(way, {})
    federate(model=model, clients=files, task=task, method=method, out=folder / "run", **settings)
    (record,) = json.loads((folder / "run/result.json").read_text())["methods"][method]["runs"]
    scores = {
        f"{point} {metric}": values["per_client"]
        for point in ("served", "before_averaging", "deploy")
        for metric, values in (record[point] or {}).items()
    }
    states = sorted((folder / "run/state").rglob("*.safetensors"))
    adapters = {path.stem: projections(load_file(path)) for path in states}
    sent = record["bytes_per_round"]
    return {"adapters": adapters, "scores": scores, "sent": sent["adapter"] + sent["head"]}


def in_federation(
    method: str, task: str, model: Path, files: list[Path], folder: Path, way: str
) -> dict[str, Any]:
    config = SETTINGS | OF_TASK[task] | {"task": task}
    labels = {"classification": ("neg", "pos"), "question-answering": ("answer", "no answer")}.get(task, ())
    plan = make_plan(method, NAMES, config=config, labels=labels)
    own = {
        site: write_site_file(folder / "sites" / site / "site.toml", folder, site, model) for site in NAMES
    }
    for file in own.values():
        with file.open("a", encoding="utf8") as site_file:
            site_file.write("validation_ratio = 0.0\n")  # of its [data]: every row is learned from
    for site, file in zip(NAMES, files):
        for part in ("train", "test"):  # the same rows in both: what is pinned is how they are used
            (folder / part).mkdir(exist_ok=True)
            (folder / part / f"{site}.jsonl").write_bytes(file.read_bytes())
    small = Small(plan, folder, own)
    small.run()
    final = json.loads((folder / "server/final.json").read_text())
    states = sorted((folder / "state").rglob("state/clients/*.safetensors"))
    adapters = {path.stem: projections(load_file(path)) for path in states}
    if small.coordinator.common is not None:
        layout, common = (
            small.coordinator.known_method.arrives(plan.run.training.rounds),
            small.coordinator.common,
        )
        adapters["common"] = projections({n: t[0] for n, t in layout.unpack(common[None]).items()})
    scores = {site: sorted(answer.get("served", {}).items()) for site, answer in final.items()}
    sent = sum(numel for _, data in small.messages for numel in [numbers_in(data)])
    return {
        "adapters": adapters,
        "scores": {site: [v for _, v in s] for site, s in scores.items()},
        "sent": sent,
    }


def numbers_in(data: bytes) -> int:
    from pf2lora.federation.protocol import messages

    return sum(t.numel() for t in messages.decode(data).tensors.values())


def projections(tensors: dict[str, torch.Tensor]) -> list[float]:
    """Each kind of tensor (A, B, C, D, the head's) on a fixed random direction: any change of a number shows."""
    found = []
    for name in sorted(tensors):
        if name.endswith("qa_outputs.bias"):
            continue  # its gradient is zero but for rounding, of which AdamW makes whole steps
        flat = tensors[name].double().flatten().numpy()
        direction = np.random.default_rng(len(flat)).standard_normal(len(flat))
        found.append(float(flat @ direction))
    return [round(v, 9) for v in found]


def record(methods: Sequence[str]) -> None:
    """The runs of some methods, beside what is recorded of the others."""
    found = json.loads(RECORDED.read_text())
    for case in CASES:
        if case[0] in methods:
            with tempfile.TemporaryDirectory() as folder:
                found[name_of(*case)] = run(*case, Path(folder))
            print(name_of(*case), file=sys.stderr)
    known = {name_of(*case): found[name_of(*case)] for case in CASES if name_of(*case) in found}
    RECORDED.write_text(json.dumps(known, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    record(resolved(sys.argv[1:] or ["all"]))
