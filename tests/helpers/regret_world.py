"""A small world for the benchmark of regret: a model, a data folder, and runs that nobody made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from little_world import sentences, write_model

from pf2lora.reproduce.regret.records import Run, Runs, SeedScores, Try
from pf2lora.run.result import OverClients


def write_sst2(folder: Path) -> None:
    """SST-2's two files, of little_world's sentences; every third has a negation."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, seed in (("train", 160, 1), ("dev", 64, 2)):
        lines = [
            f"{'not ' if i % 3 == 0 else ''}{row['text']}\t{int(row['label'] == 'pos')}"
            for i, row in enumerate(sentences(count, seed))
        ]
        (folder / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf8")


def make_benchmark(root: Path) -> Path:
    """`root/model` and `root/data`, with the data of SST-2 alone."""
    write_model(root / "model")
    write_sst2(root / "data" / "glue_sst2")
    return root


def made_up(task: str, variant: str, *seeds: list[float], metric: str = "accuracy", **changes: Any) -> Run:
    """A run with these scores of its clients, a list for each seed, the same at both points."""
    scores = []
    for seed, values in enumerate(seeds):
        table = {metric: OverClients(list(values), sum(values) / len(values), min(values), 0.0)}
        scores.append(SeedScores(seed, {"served": table, "deploy": table}, {}))
    training = {"rounds": 2, "steps": 2, "batch_size": 8}
    about: dict[str, Any] = {
        "task": task,
        "variant": variant,
        "base_model": "tiny",
        "settings": {"model": {"precision": "float32"}, "training": training},
        "seeds": list(range(len(seeds))),
        "tries": [Try({"lr": 1e-3}, None)],
        "rates": {"lr": 1e-3},
        "clients": [f"client-{k + 1}" for k in range(len(seeds[0]))],
        "scores": scores,
        "diverged": "",
        "seconds": 10.0,
        "created": "2026-11-17T00:00:00+00:00",
        "machine": {"name": "nowhere"},
        "versions": {},
    }
    return Run(**about | changes)


def together(*runs: Run) -> Runs:
    return {run.key: run for run in runs}
