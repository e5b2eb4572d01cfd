"""Which rule for the lower level's size is never far from the best method? Tries rules on a few tasks, a line each.

    python benchmarks/models.py --models mpnet --out carry
    python benchmarks/lower_level.py --model carry/mpnet --data ../shared/data --out lower_level.jsonl

The rules that were tried, and what came of them, are in docs/reproduction.md.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pf2lora.methods import own_size
from pf2lora.run.comparison import compare, prepare
from pf2lora.run.config import from_settings

DOMAINS = {
    "tweets": "tweets",
    "film": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
}

Settings = dict[str, Any]

RULES: dict[str, tuple[Settings, dict[str, Any]]] = {
    "homlora": ({"method": ["homlora"]}, {}),
    "personal head": ({"method": ["homlora"], "head": "personal"}, {}),
    "local": ({"method": ["local"]}, {}),
    "hetlora": ({"method": ["hetlora"]}, {}),
    "auto": ({}, {}),
    "no caution": ({}, {"CAUTION": 0.0}),
    "more caution": ({}, {"CAUTION": 1.0}),
    "no bias": ({"client_bias": False}, {}),
    "larger": ({}, {"ALPHA": 0.3}),
    "short steps": ({}, {"ALPHA": 1.0, "LONGEST": 0.1}),
    "normalised": ({}, {"ALPHA": 1e4, "LONGEST": 0.1}),
    "bias alone": ({"client_rank": 0}, {"ALPHA": 1.0, "LONGEST": 1e9}),
    "fixed 0.03": ({"client_lr": 0.03}, {}),
}
"""What is run: settings, and values of `methods/own_size.py`."""


def vader(data: Path, out: Path) -> list[str]:
    """The four natural domains, |valence| ≥ 0.3."""
    files = []
    for name, source in DOMAINS.items():
        text = (data / "vader" / f"{source}_GroundTruth.txt").read_text(encoding="utf8", errors="replace")
        rows = [line.split("\t") for line in text.splitlines() if line.count("\t") >= 2]
        kept = [
            {"text": r[2], "label": "positive" if float(r[1]) > 0 else "negative"}
            for r in rows
            if abs(float(r[1])) >= 0.3
        ]
        files.append(write(out / "vader" / f"{name}.jsonl", kept))
    return files


def flipped(data: Path, out: Path) -> tuple[list[str], list[str]]:
    """SST-2 on eight clients; the labels of every other client are the opposite ones."""
    rows = {}
    for part in ("train", "dev"):
        lines = (data / "glue_sst2" / f"{part}.tsv").read_text(encoding="utf8").splitlines()[1:]
        rows[part] = [line.rsplit("\t", 1) for line in lines]
        random.Random(0).shuffle(rows[part])
    files: dict[str, list[str]] = {"train": [], "dev": []}
    for k in range(8):
        for part, count in (("train", 1000), ("dev", 109)):
            own = rows[part][k * count : (k + 1) * count]
            labelled = [
                {"text": t, "label": label if k % 2 == 0 else str(1 - int(label))} for t, label in own
            ]
            files[part].append(write(out / "flipped" / part / f"c{k}.jsonl", labelled))
    return files["train"], files["dev"]


def write(file: Path, rows: list[dict[str, str]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return str(file)


def tasks(data: Path, out: Path) -> dict[str, Settings]:
    """The tasks' settings."""
    train, test = flipped(data, out)
    sst2 = {"dataset": "sst2", "data_dir": str(data / "glue_sst2")}
    cola = {"dataset": "cola", "data_dir": str(data / "glue_cola")}
    return {
        "sst2 few": sst2 | {"heterogeneity": 0.9, "limit": 100, "rounds": 30},
        "cola 0.3": cola | {"heterogeneity": 0.3, "rounds": 60},
        "vader": {"clients": vader(data, out), "rounds": 60},
        "sst2 0.9": sst2 | {"heterogeneity": 0.9, "rounds": 60, "limit": 2000},
        "flipped": {"clients": train, "test": test, "rounds": 30},
    }


def runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ends = time.monotonic() + 60 * options.minutes
    shared = {
        "model": options.model,
        "steps": 10,
        "batch_size": 16,
        "max_length": 64,
        "seeds": options.seeds,
        "precision": options.precision,
        "hypergradient_mode": "none",
        "evaluate_every": options.every,
        "method": ["pf2lora"],
    }
    if options.rounds:
        shared["rounds"] = options.rounds
    chosen = {
        n: s for n, s in tasks(options.data, options.work).items() if not options.tasks or n in options.tasks
    }
    workloads = {}
    for rule in options.rules or RULES:
        settings, values = RULES[rule]
        for task, of_task in chosen.items():
            if time.monotonic() > ends:
                return
            config = from_settings(of_task | shared | settings, rule)
            if task not in workloads:
                workloads[task] = prepare(config)
            started = time.monotonic()
            with patch.multiple(own_size, **{"ALPHA": own_size.ALPHA} | values):
                result = compare(config, workload=replace(workloads[task], config=config))
            (method,) = result.methods.values()
            found: dict[str, Any] = {
                "task": task,
                "rule": rule,
                "seconds": round(time.monotonic() - started, 1),
            }
            for point in ("served", "before_averaging", "deploy"):
                found[point] = [means(run.at(point), result.metric) for run in method.runs]
            names = sorted({name for run in method.runs for name in run.candidates})
            found["candidates"] = {
                n: [means(run.candidates.get(n), result.metric) for run in method.runs] for n in names
            }
            found["chosen"] = [
                [c.candidate[0] + str(c.round) for c in run.choices or ()] for run in method.runs
            ]
            found["share"] = [r.client_share for r in method.runs[0].rounds if r.client_share][-1:]
            found["loss"] = [run.deployed_loss for run in method.runs]
            yield found


def means(scores: Any, metric: str) -> float | None:
    return None if scores is None or scores[metric].mean is None else round(100 * scores[metric].mean, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--work", type=Path, default=Path("build/lower_level"))
    parser.add_argument("--out", type=Path, default=Path("build/lower_level.jsonl"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--rules", nargs="*")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf8") as file:
        for found in runs(options):
            line = json.dumps(found, ensure_ascii=False)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()


if __name__ == "__main__":
    main()
