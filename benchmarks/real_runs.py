"""What the real runs share: methods trained on a task's clients, measured, printed as a table, written as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import machine, versions
from transformers import PreTrainedModel
from transformers.utils import logging

from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.core.method import State
from pf2lora.data.client import Client
from pf2lora.engines.local import Schedule, train
from pf2lora.methods import METHODS
from pf2lora.run.config import Config
from pf2lora.run.trial import source_of
from pf2lora.tasks.base import Task


@dataclass(frozen=True)
class Settings:
    """What a method is trained with; `lr` is η, `client_lr` α."""

    rounds: int
    steps: int
    batch_size: int
    rank: int
    client_rank: int
    lr: float
    client_lr: float
    scaling: float
    seed: int
    device: str
    precision: str


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every real run has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--data", type=Path, default=Path("/work/shared/data"), help="folder of the data sets"
    )
    options.add_argument(
        "--model", type=Path, required=True, help="a model folder (benchmarks/models.py makes them)"
    )
    options.add_argument("--methods", nargs="+", default=["homlora", "pf2lora"], choices=list(METHODS))
    options.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options.add_argument("--summary", type=Path, help="also write the figures without the texts here")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    options.add_argument("--clients", type=int, default=None, help="only the first so many clients")
    options.add_argument("--test-limit", type=int, default=None, help="at most so many test rows per client")
    for name, value in defaults.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    logging.disable_progress_bar()
    return options


def settings(given: argparse.Namespace) -> Settings:
    return Settings(**{name: getattr(given, name) for name in Settings.__dataclass_fields__})


def few(clients: Sequence[Client[Any]], given: argparse.Namespace) -> list[Client[Any]]:
    """The clients and test rows that the options leave."""
    chosen = list(clients)[: given.clients]
    return [Client(c.name, c.train, c.test[: given.test_limit]) for c in chosen]


def train_method(
    name: str, base: PreTrainedModel, task: Task[Any, Any], clients: Sequence[Client[Any]], s: Settings
) -> tuple[TwoLevelModel, State, list[float], float]:
    """The model, its served state, the mean training loss of every round, and the seconds it took."""
    method_type = METHODS[name]
    spec = AdapterSpec(
        rank=s.rank,
        client_rank=s.client_rank if method_type.two_level else 0,
        scaling=s.scaling,
        client_scaling=s.scaling,
    )
    model = TwoLevelModel(base, spec)
    names = [client.name for client in clients]
    encoded = task.encode([client.train for client in clients], training=True).to(torch.device(s.device))
    rates = {"lr": s.lr} | ({"client_lr": s.client_lr} if method_type.two_level else {})
    method = method_type(model.x, **rates)  # type: ignore[arg-type]
    x, y = (t.to(s.device) for t in model.initial(s.seed, names))
    source = source_of(Config(batch_size=s.batch_size), encoded, names, s.seed, method.draws)
    schedule = Schedule(s.rounds, s.steps, seed=s.seed)
    losses, started = [], time.perf_counter()
    loss = partial(task.loss, model)
    for done in train(method, loss, method.init(x, y), source, schedule, device=s.device):
        losses.append(float(done.report.loss.mean()))
        every = max(1, s.rounds // 10)
        if done.number % every == 0 or done.number == 1:
            print(f"{name}: round {done.number}/{s.rounds}, training loss {losses[-1]:.4f}", flush=True)
    return model, done.served, losses, time.perf_counter() - started


def mean_scores(scores: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The mean over the clients where a score is defined."""
    means: dict[str, float | None] = {}
    for name in scores[0]:
        known = [s[name] for s in scores if s.get(name) is not None]
        means[name] = sum(known) / len(known) if known else None  # type: ignore[arg-type]
    return means


def run(
    task: Task[Any, Any],
    clients: Sequence[Client[Any]],
    given: argparse.Namespace,
    outputs: Callable[[Any], str],
    **about: Any,
) -> dict[str, Any]:
    """Every method: served scores after the last round, written after each. `outputs` is the text of a prediction,
    which is kept; `about` goes into the file as it is."""
    s = settings(given)
    base = task.load_model(str(given.model), getattr(torch, s.precision))
    base.to(s.device)  # type: ignore[arg-type]
    test = task.encode([client.test for client in clients], training=False).to(torch.device(s.device))
    found: dict[str, Any] = {}
    result = {
        "settings": s.__dict__ | {"model": given.model.name, "versions": versions("torch", "transformers")},
        "machine": machine(torch.device(s.device)),
        "clients": [{"name": c.name, "train": len(c.train), "test": len(c.test)} for c in clients],
        "methods": found,
        **about,
    }
    for name in given.methods:
        model, served, losses, seconds = train_method(name, base, task, clients, s)
        started = time.perf_counter()
        predictions = task.predict(model, served.x, served.y, test, final=True)
        answering = time.perf_counter() - started
        scores = task.score_clients(predictions, [client.test for client in clients])
        found[name] = {
            "scores": mean_scores(scores),
            "per_client": scores,
            "train_loss": losses,
            "train_seconds": round(seconds, 1),
            "predict_seconds": round(answering, 1),
            "outputs": [[outputs(p) for p in client] for client in predictions],
        }
        model.remove()
        result["notes"] = [*about.get("notes", []), *task.notes]
        write(result, given.out)
        if given.summary:
            write(without_texts(result), given.summary)
    return result


def print_table(result: dict[str, Any]) -> None:
    """One line per method, the mean over clients of each served score."""
    methods = result["methods"]
    names = list(next(iter(methods.values()))["scores"])
    print("\n| method | " + " | ".join(names) + " | training loss, first and last round | seconds |")
    print("| --- " * (len(names) + 3) + "|")
    for name, found in methods.items():
        shown = ["absent" if found["scores"][n] is None else f"{found['scores'][n]:.4f}" for n in names]
        losses = f"{found['train_loss'][0]:.3f} → {found['train_loss'][-1]:.3f}"
        seconds = f"{found['train_seconds']} + {found['predict_seconds']}"
        print(f"| {name} | " + " | ".join([*shown, losses, seconds]) + " |")
    for note in result["notes"]:
        print(f"note: {note}")


def without_texts(result: dict[str, Any]) -> dict[str, Any]:
    """The result as `benchmarks/results/` keeps it: every figure, and none of the data's texts."""
    methods = {
        name: {k: v for k, v in found.items() if k != "outputs"} for name, found in result["methods"].items()
    }
    kept = {k: v for k, v in result.items() if k not in ("items", "questions")}
    return kept | {"methods": methods}


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf8")
