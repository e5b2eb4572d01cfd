"""A whole `result.json` made of seeded random numbers, for the tests of its readers. No measurement."""

from __future__ import annotations

import copy
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from pf2lora.methods import METHODS as OURS
from pf2lora.run.result import Result, from_json

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
METHODS = {  # name: (label, accuracy it tends to, what averaging costs it, has a client adapter)
    "pf2lora": ("PF2LoRA", 0.905, 0.012, True),
    "pf2lora-joint": ("PF2LoRA (joint)", 0.901, 0.015, True),
    "homlora": ("HOMLoRA", 0.872, 0.03, False),
    "per-fedavg": ("Per-FedAvg", 0.858, 0.055, False),
    "hetlora": ("HetLoRA", 0.865, 0.02, False),
    "centralized": ("Centralized", 0.899, None, False),
    "local": ("Local", 0.852, None, False),
}
NAMES = ["clinic-a", "clinic-b", "archive", "newsroom", "forum-de", "forum-en", "helpdesk", "field-office"]
METRICS = {
    "accuracy": {"label": "accuracy", "higher_is_better": True, "percent": True},
    "matthews": {"label": "Matthews correlation", "higher_is_better": True, "percent": True},
    "loss": {"label": "test loss", "higher_is_better": False, "percent": False},
}


def make_result(
    clients: int = 8, seeds: int = 3, rounds: int = 20, layers: int = 12, task: str = "classification"
) -> dict[str, Any]:
    """A result of every method, as a finished run would have written it."""
    rng = random.Random(20250715)
    names = [NAMES[k % len(NAMES)] + ("" if k < len(NAMES) else f"-{k}") for k in range(clients)]
    ease = [rng.gauss(0, 0.03) for _ in names]  # some clients are easier than others, for every method
    methods = {
        name: {
            "label": METHODS[name][0],
            "runs": [_run(rng, name, seed, ease, rounds, layers) for seed in range(seeds)],
            "failed": None,
        }
        for name in METHODS
    }
    return {
        "format": 3,
        "title": f"Reviews, {clients} clients",
        "created": "2026-11-15T04:05:06+00:00",
        "task": task,
        "metric": "accuracy",
        "metrics": METRICS,
        "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "clients": [_client(rng, name) for name in names],
        "config": {
            "model": "sentence-transformers/all-MiniLM-L6-v2",
            "rounds": rounds,
            "seeds": seeds,
            "adapter": {"rank": 8, "client_rank": 2, "targets": ["query", "value"]},
            "optimizer": {"lr": 0.001, "client_lr": 0.03, "name": "adamw"},
        },
        "versions": {"pf2lora": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.22.2", "python": "3.11.7"},
        "machine": {"device": "cpu", "name": "x86_64", "cores": 2, "memory_bytes": 25_000_000_000},
        "methods": methods,
        "examples": [] if task == "classification" else _examples(names),
        "newcomers": [],
        "baselines": {},
        "labels": [],
    }


def with_many_methods(result: dict[str, Any]) -> dict[str, Any]:
    """The same with every method of the package: those that the example lacks do as HOMLoRA, each a little worse."""
    many = copy.deepcopy(result)
    many["title"] = f"All methods, {len(result['clients'])} clients"
    for i, name in enumerate(name for name in OURS if name not in METHODS):
        runs = copy.deepcopy(result["methods"]["homlora"]["runs"])
        for run in runs:
            for point in ("served", "before_averaging", "deploy"):
                for metric, scores in (run[point] or {}).items():
                    worse = 0.006 * (i + 1) * (1 if metric == "loss" else -1)
                    shifted = [v if v is None else v + worse for v in scores["per_client"]]
                    run[point][metric] = table(shifted)
            run["seconds"] *= 1 + 0.15 * (i % 4)
            run["bytes_per_round"]["adapter"] *= (1, 0.5, 2)[i % 3]
        many["methods"][name] = {"label": OURS[name].label, "runs": runs, "failed": None}
    return many


def typed(result: dict[str, Any]) -> Result:
    """The same as `load_result` gives it."""
    return from_json(copy.deepcopy(result), "example")


def _client(rng: random.Random, name: str) -> dict[str, Any]:
    size, share = rng.randrange(200, 1000), rng.choice([0.1, 0.25, 0.5, 0.8, 0.92])
    negative = round(size * share)
    return {
        "name": name,
        "train": size,
        "test": size // 4,
        "validation": size // 9,
        "labels": {"negative": negative, "positive": size - negative},
    }


def _run(
    rng: random.Random, name: str, seed: int, ease: list[float], rounds: int, layers: int
) -> dict[str, Any]:
    _, _, cost, personal = METHODS[name]
    taste = [rng.gauss(0, 0.012) for _ in ease]
    history = [
        _round(rng, r, rounds, name, [e + t for e, t in zip(ease, taste)], layers) for r in range(rounds)
    ]
    final = history[-1]
    served = {metric: table(values) for metric, values in final["served"].items()}
    before = None
    if cost is not None:
        before = {metric: table(values) for metric, values in final["before_averaging"].items()}
    chosen = random.Random(f"{name} {seed}")
    return {
        "seed": seed,
        "served": served,
        "before_averaging": before,
        "deploy": {metric: _raised(values, 0.004) for metric, values in final["served"].items()},
        "choices": [_choice(chosen, rounds, federated=cost is not None) for _ in ease],
        "candidates": {"served": served} | ({} if before is None else {"before_averaging": before}),
        "rounds": history,
        "layers": [
            f"encoder.layer.{i // 2}.attention.self.{('query', 'value')[i % 2]}" for i in range(layers)
        ],
        "parameters": {"common": 73_728, "client": 18_432 if personal else 0, "head": 770},
        "bytes_per_round": {
            "adapter": 0 if cost is None else 294_912,
            "head": 0 if cost is None else 3_080,
        },
        "flops_per_round": 3.1e12 if personal else 1.1e12,
        "seconds": rng.uniform(55, 65) * (2.6 if personal else 1),
        "evaluation_seconds": rng.uniform(5, 6),
        "peak_memory_bytes": 912_000_000 + (150_000_000 if personal else 0),
        "privacy": None,
        "warnings": ["client 'archive': the training loss rose above its start (0.69 → 0.75)"]
        if name == "per-fedavg" and seed == 1
        else [],
        "resampled": {},
        "confusion": None,
        "resize_seconds": None,
        "common_round": None,
        "settings": {"lr": 0.001, "weight_decay": 0.01, "optimizer": "adamw"},
    }


def _round(
    rng: random.Random, index: int, rounds: int, name: str, ease: list[float], layers: int
) -> dict[str, Any]:
    _, goal, cost, personal = METHODS[name]
    progress = 1 - math.exp(-4 * (index + 1) / rounds)

    def scores(level: float) -> dict[str, list[float | None]]:
        accuracy = [min(0.995, 0.5 + (level + e - 0.5) * progress + rng.gauss(0, 0.006)) for e in ease]
        matthews: list[float | None] = [2 * a - 1 for a in accuracy]
        matthews[-1] = None  # undefined where the test rows have one label only
        return {
            "accuracy": list(accuracy),
            "matthews": matthews,
            "loss": [1.6 * (1 - a) + 0.1 for a in accuracy],
        }

    evaluated = index % 2 == 1 or index == rounds - 1
    trained: list[float | None] = [0.7 - 0.55 * progress * (0.8 + 4 * e) + rng.gauss(0, 0.01) for e in ease]
    trained[index % len(trained)] = None  # did not take part
    growth = 1.5 + 5 * progress
    return {
        "round": index + 1,
        "left_out": {},
        "seconds": rng.uniform(2.8, 3.2),
        "train_loss": trained,
        "validation_loss": [0.7 - 0.5 * progress + 0.05 * max(0, index - rounds / 2) for _ in ease]
        if evaluated
        else None,
        "served": scores(goal) if evaluated else None,
        "before_averaging": scores(goal + cost) if evaluated and cost is not None else None,
        "client_share": [0.02 * progress * rng.uniform(0.6, 1.6) for _ in ease] if personal else None,
        "second_order_share": [5e-6 * (1 + progress * rng.uniform(0, 8)) for _ in ease]
        if name == "pf2lora"
        else None,
        "ranks": [[max(1, round(rng.gauss(growth, 0.7))) for _ in range(layers)] for _ in ease]
        if evaluated and name != "centralized"
        else None,
    }


def _choice(rng: random.Random, rounds: int, federated: bool) -> dict[str, Any]:
    losses = {"served": rng.uniform(0.3, 0.4)}
    if federated:
        losses |= {"before_averaging": rng.uniform(0.3, 0.4), "personal_steps": rng.uniform(0.3, 0.4)}
    candidate = min(losses, key=lambda name: losses[name])
    return {
        "candidate": candidate,
        "round": rounds,
        "validation_loss": losses[candidate],
        "last_round": losses,
    }


def _raised(values: list[float | None], by: float) -> dict[str, Any]:
    return table([None if value is None else value + by for value in values])


def table(values: list[float | None]) -> dict[str, Any]:
    """A metric's entry of `served` or `before_averaging`, from its per-client values."""
    known = [v for v in values if v is not None]
    return {
        "per_client": values,
        "mean": statistics.fmean(known),
        "worst": min(known),
        "spread": statistics.pstdev(known),
    }


def _examples(names: list[str]) -> list[dict[str, Any]]:
    """Prompts as E2E has them, with outputs that differ by a word or two."""
    places = ["The Vaults", "Blue Spice", "Loch Fyne", "The Punter"]
    texts = [
        "{} is a cheap family friendly pub near Café Adriatic.",
        "{} is a cheap, family-friendly pub near Café Adriatic.",
        "{} is a pub near Café Adriatic. It is cheap and family friendly.",
        "Near Café Adriatic there is a cheap pub named {} with a customer rating of 5 out of 5.",
    ]
    return [
        {
            "client": name,
            "prompt": f"name : {place} | Type : pub | price : cheap | familyFriendly : yes | near : Café Adriatic",
            "references": [
                texts[1].format(place),
                f"For families there is {place}, a cheap pub near Café Adriatic.",
            ],
            "outputs": {
                method: texts[(i + j) % len(texts)].format(place) for j, method in enumerate(METHODS)
            },
        }
        for i, name in enumerate(names)
        for place in places[: 1 + i % 2]
    ]


def small(**scores: list[float]) -> dict[str, Any]:
    """A result in which each method has these served means, one per seed, the same for both clients; nothing is chosen
    by validation rows."""
    result = make_result(clients=2, seeds=max(map(len, scores.values())), rounds=2, layers=2)
    result["methods"] = {name: result["methods"][name] for name in result["methods"] if name in scores}
    for name, values in scores.items():
        runs = result["methods"][name]["runs"]
        result["methods"][name]["runs"] = runs[: len(values)]
        for run, value in zip(runs, values):
            run["served"]["accuracy"] = table([value, value])
            run["before_averaging"] = run["before_averaging"] and {"accuracy": table([value, value])}
    return without_choices(result)


def without_choices(result: dict[str, Any]) -> dict[str, Any]:
    """The same as a run without validation rows leaves it."""
    for client in result["clients"]:
        client["validation"] = 0
    for method in result["methods"].values():
        for run in method["runs"]:
            run |= {"deploy": None, "choices": None, "candidates": {}}
            for entry in run["rounds"]:
                entry["validation_loss"] = None
    return result


def sparse() -> dict[str, Any]:
    """Everything null that may be null."""
    result = make_result(clients=2, seeds=1, rounds=3, layers=2)
    result["methods"] = {name: result["methods"][name] for name in ("pf2lora", "local")}
    for method in result["methods"].values():
        for run in method["runs"]:
            run["before_averaging"] = run["flops_per_round"] = run["peak_memory_bytes"] = None
            run["served"]["accuracy"] = {
                "per_client": [None, 0.5],
                "mean": 0.5,
                "worst": None,
                "spread": None,
            }
            for entry in run["rounds"]:
                for key in ("served", "before_averaging", "client_share", "second_order_share", "ranks"):
                    entry[key] = None
                entry["train_loss"] = [None, None]
    for client in result["clients"]:
        client["labels"] = {}
    return without_choices(result)


def hostile() -> dict[str, Any]:
    """A result in which every text from outside is markup."""
    result = make_result(clients=2, seeds=2, rounds=4, layers=2, task="generation")
    result["title"] = result["base_model"] = HOSTILE
    result["config"] = {HOSTILE: HOSTILE}
    result["versions"] = {HOSTILE: HOSTILE}
    result["clients"][0] |= {"name": HOSTILE, "labels": {HOSTILE: 3, "</script>": 4}}
    for method in result["methods"].values():
        method["label"] = HOSTILE
        for run in method["runs"]:
            run["warnings"] = [HOSTILE]
            run["layers"][0] = HOSTILE
    for example in result["examples"]:
        example |= {"client": HOSTILE, "prompt": HOSTILE, "references": [HOSTILE]}
        example["outputs"] = dict.fromkeys(example["outputs"], HOSTILE)
    return result


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "result.json").write_text(text, encoding="utf-8")
    return folder
