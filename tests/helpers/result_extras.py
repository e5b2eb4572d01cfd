"""More of the example result (result_example.py): newcomers, baselines, answers by label. No measurement."""

from __future__ import annotations

import copy
from typing import Any

from result_example import table


def with_newcomers(result: dict[str, Any]) -> dict[str, Any]:
    """The same with two clients that joined later."""
    return result | {
        "newcomers": [
            _newcomer("clinic-z", "pf2lora", "own"),
            _newcomer("branch-office", "homlora", "common"),
        ]
    }


def _newcomer(name: str, method: str, served: str) -> dict[str, Any]:
    """One that chose what it is served, or some steps from there."""
    chosen = served if served == "own" else "personal_steps"
    scores = {served: 0.85, "common": 0.85, "personal_steps": 0.877, "local": 0.79}
    losses = {served: 0.41, "common": 0.43, "personal_steps": 0.39, "local": 0.55}
    return {
        "client": {
            "name": name,
            "train": 120,
            "test": 40,
            "labels": {"negative": 70, "positive": 50},
            "validation": 20,
        },
        "method": method,
        "created": "2026-11-16T04:05:06+00:00",
        "rounds": 20,
        "served": served,
        "choice": {"candidate": chosen, "round": 20, "validation_loss": losses[chosen], "last_round": losses},
        "deploy": {"accuracy": scores[chosen], "matthews": None, "loss": 0.4},
        "scores": {key: {"accuracy": value, "matthews": None, "loss": 0.4} for key, value in scores.items()},
        "errors": dict.fromkeys([*scores, "deploy"], 0.055),
        "client_lr": "auto" if served == "own" else None,
    }


def with_classes(result: dict[str, Any]) -> dict[str, Any]:
    """The same with what no training gives, and right labels and answers of every client."""
    result = copy.deepcopy(result) | {"labels": ["negative", "positive"]}
    clients = len(result["clients"])

    def level(value: float) -> dict[str, Any]:
        return {"accuracy": table([value + 0.01 * (k % 3) for k in range(clients)])}

    result["baselines"] = {
        "untrained": {"label": "untrained (round 0)", "scores": level(0.5)},
        "trivial": {"label": "majority label", "scores": level(0.6)},
    }
    for method in result["methods"].values():
        for run in method["runs"]:
            run["confusion"] = [[[40 + k, 10], [5, 45]] for k in range(clients)]
    return result
