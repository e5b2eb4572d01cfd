"""What client-level differential privacy costs in score, over ε and the number of clients: docs/dp.svg.

    python benchmarks/dp_cost.py --out dp_cost.jsonl --figure docs/dp.svg
    python benchmarks/dp_cost.py --read dp_cost.jsonl

A tiny model on small texts (`small_texts.py`), on a CPU; the noise is the operating system's, so another run differs by
it. A finished run is a line of --out, and is not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from small_texts import write_clients, write_model

import pf2lora
from pf2lora.run.estimates import Estimate, estimate

CLIENTS, EPSILONS, METHODS, SEEDS = (8, 64, 256), (math.inf, 8.0, 4.0, 2.0, 1.0), ("homlora", "pf2lora"), 3
ROWS = 60  # of each client; a third of them to test on
SETTINGS: dict[str, Any] = {
    "rank": 2,
    "client_rank": 1,
    "rounds": 20,
    "steps": 5,
    "batch_size": 8,
    "max_length": 12,
    "lr": 0.03,
    "client_lr": 0.1,
    "hypergradient_mode": "none",
    "test_ratio": 1 / 3,
    "validation_ratio": 0.0,
    "evaluate_every": 1000,  # the last round alone
    "device": "cpu",
}
CLIP = 1.0


def run(
    method: str, clients: int, epsilon: float, model: str, files: list[str], seeds: int
) -> dict[str, Any]:
    """One line: the accuracy with each seed, and what it cost."""
    private: dict[str, Any] = {} if math.isinf(epsilon) else {"dp_epsilon": epsilon, "dp_clip": CLIP}
    started = time.perf_counter()
    result = pf2lora.federate(model=model, clients=files, method=method, seeds=seeds, **SETTINGS, **private)
    runs = result.methods[method].runs
    sent = runs[0].bytes_per_round
    return {
        "method": method,
        "clients": clients,
        "epsilon": None if math.isinf(epsilon) else epsilon,
        "noise": runs[0].privacy.noise if runs[0].privacy else 0.0,
        "accuracy": [r.served["accuracy"].mean for r in runs],
        "numbers": int(sent.total) // 4,
        "seconds": round(time.perf_counter() - started, 1),
    }


def runs(out: Path | None, clients: list[int], seeds: int) -> list[dict[str, Any]]:
    """Every run, those in `out` as they are there; `local` sends nothing and needs no ε."""
    done = read(out) if out is not None and out.exists() else []
    known = {(d["method"], d["clients"], d["epsilon"]) for d in done}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        for count in clients:
            files = write_clients(Path(folder) / str(count), count, ROWS)
            asked = [("local", math.inf), *((m, e) for m in METHODS for e in EPSILONS)]
            for method, epsilon in asked:
                if (method, count, None if math.isinf(epsilon) else epsilon) in known:
                    continue
                done.append(run(method, count, epsilon, model, files, seeds))
                print(json.dumps(done[-1]), flush=True)
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(done[-1]) + "\n")
    return done


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def score(done: list[dict[str, Any]], method: str, clients: int, epsilon: float | None) -> Estimate | None:
    """The accuracy over seeds of one cell."""
    found = [d for d in done if (d["method"], d["clients"], d["epsilon"]) == (method, clients, epsilon)]
    return estimate(found[0]["accuracy"]) if found else None


def table(done: list[dict[str, Any]]) -> str:
    """A line for each method and number of clients, in Markdown."""
    columns = [None if math.isinf(e) else e for e in EPSILONS]
    heads = ["no noise" if e is None else f"ε = {e:g}" for e in columns]
    lines = [f"| clients | method | {' | '.join(heads)} |", "| --- " * (2 + len(heads)) + "|"]
    for count in sorted({d["clients"] for d in done}):
        for method in ("local", *METHODS):
            cells = [shown(score(done, method, count, e)) for e in columns]
            lines.append(f"| {count} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(found: Estimate | None) -> str:
    """A score in per cent."""
    if found is None:
        return ""
    spread = "" if found.deviation is None else f" ± {100 * found.deviation:.1f}"
    return f"{100 * found.mean:.1f}{spread}"


def figure(done: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over ε, a line for each number of clients; dashed: without noise."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "pf2lora"
    counts = sorted({d["clients"] for d in done})
    epsilons = sorted(e for e in EPSILONS if not math.isinf(e))
    whole, places = pyplot.subplots(1, len(METHODS), figsize=(9, 3.6), sharey=True, squeeze=False)
    for place, method in zip(places[0], METHODS):
        for i, count in enumerate(counts):
            cells = [score(done, method, count, e) for e in epsilons]
            known = [(e, c) for e, c in zip(epsilons, cells) if c is not None]
            means = [100 * c.mean for _, c in known]
            spread = [100 * (c.deviation or 0) for _, c in known]
            place.errorbar(
                [e for e, _ in known],
                means,
                spread,
                color=f"C{i}",
                marker="o",
                capsize=3,
                label=f"{count} clients",
            )
            plain = score(done, method, count, None)
            if plain is not None:
                place.axhline(100 * plain.mean, color=f"C{i}", linestyle="--", linewidth=1)
        place.set_xscale("log", base=2)
        place.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
        place.set_xlabel("ε (δ = 1e-5)")
        place.set_title(method)
    places[0][0].set_ylabel("served accuracy, %")
    places[0][0].legend(title="dashed: no noise")
    whole.tight_layout()
    whole.savefig(path, metadata={"Date": None})


def main() -> None:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    done = read(given.read) if given.read else runs(given.out, given.clients, given.seeds)
    print(table(done))
    if given.figure:
        figure(done, given.figure)


if __name__ == "__main__":
    main()
