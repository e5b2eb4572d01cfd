"""The plain data that the page's charts draw from."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from pf2lora.methods import group_of
from pf2lora.report.views import COLORS, Series, same_clients, total
from pf2lora.run.result import POINTS, ROUND_POINTS, Result, SeedRun
from pf2lora.run.verdicts import client_differences

RANK_ROUNDS = 40  # rank pictures kept per seed: enough for a slider, and the file stays small


def payload(runs: list[Result], series: list[Series], metric: str) -> dict[str, Any]:
    """What the page's script draws from: no texts that it does not show, figures with six digits."""
    first = runs[0]
    common = {
        name: asdict(info) for name, info in first.metrics.items() if all(name in r.metrics for r in runs)
    }
    many = len({s.method for s in series}) > COLORS
    return _rounded(
        {
            "metric": metric,
            "metrics": common,
            "clients": [c.name for c in first.clients] if same_clients(runs) else [],
            "series": [
                {
                    "method": s.method,
                    "label": s.label,
                    "color": s.color,
                    "dash": s.dash,
                    "group": group_of(s.method) if many else "",
                    "bytes": total(s.cost("bytes_per_round", "total")),
                    "seconds": total(s.cost("seconds")),
                    "runs": [_run_payload(run, list(common)) for run in s.seeds],
                }
                for s in series
            ],
            "open": open_differences(first, series) if len(runs) == 1 and metric == first.metric else {},
            "baselines": [
                {"label": b.label, "scores": {m: s.per_client for m, s in b.scores.items() if m in common}}
                for b in (first.baselines.values() if len(runs) == 1 else ())
            ],
            "labels": first.labels if len(runs) == 1 else [],
            "apart": label_distances(first) if same_clients(runs) else [],
            "task": first.task,
            "examples": [asdict(e) for e in first.examples] if len(runs) == 1 else [],
        }
    )


def label_distances(result: Result) -> list[float | None]:
    """How far each client's labels (topics, categories) are from those of all: half the sum of the differences of their
    shares, from 0 (the same mixture) to 1 (nothing in common); None where they are not known."""
    totals: dict[str, int] = {}
    for client in result.clients:
        for label, count in client.labels.items():
            totals[label] = totals.get(label, 0) + count
    everybody = sum(totals.values())
    found: list[float | None] = []
    for client in result.clients:
        own = sum(client.labels.values())
        if not own or not everybody:
            found.append(None)
            continue
        gaps = (abs(client.labels.get(label, 0) / own - count / everybody) for label, count in totals.items())
        found.append(sum(gaps) / 2)
    return found


def open_differences(result: Result, series: list[Series]) -> dict[str, Any]:
    """By method, baseline and client: whether their difference may be chance, at the point that methods are compared
    by."""
    names = [s.method for s in series]
    found = {
        a: {b: [d and d.is_nought for d in client_differences(result, a, b)] for b in names if b != a}
        for a in names
    }
    return {"point": result.point, "clients": found}


def _run_payload(run: SeedRun, metrics: list[str]) -> dict[str, Any]:
    """One seed: its final scores per client, and its rounds."""
    with_ranks = [r.round for r in run.rounds if r.ranks is not None]
    kept = _thinned(with_ranks, RANK_ROUNDS)
    shown = ("round", "train_loss", "validation_loss", *ROUND_POINTS, "client_share", "second_order_share")
    return {
        "seed": run.seed,
        "layers": run.layers,
        "confusion": run.confusion,
        "choices": None if run.choices is None else [asdict(choice) for choice in run.choices],
        "final": {
            point: {m: scores[m].per_client if m in scores else None for m in metrics} if scores else None
            for point in POINTS
            for scores in [run.at(point)]
        },
        "rounds": [
            {key: getattr(r, key) for key in shown} | ({"ranks": r.ranks} if r.round in kept else {})
            for r in run.rounds
        ],
    }


def _thinned(rounds: list[int], most: int) -> set[int]:
    """At most `most` of the rounds, evenly, with the first and the last."""
    if len(rounds) <= most:
        return set(rounds)
    return {rounds[round(i * (len(rounds) - 1) / (most - 1))] for i in range(most)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def embedded(data: Any) -> str:
    """JSON that is safe inside a script element: no `<`, so that no text of a user can end or open one."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
