"""Newcomers of the example result (result_example.py). No measurement."""

from __future__ import annotations

from typing import Any


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
