"""What decides the rank: do learned ranks follow how different and how hard a client's data is?

Read from finished results: every client of every seed is a point. Its rank is the mean over layers of the paper's
90% rule for `s·BA + s̃·D_kC_k`; ρ is Spearman's, over the clients of one seed. How hard a client's data is does not come
from its own model, whose loss is low where its adapter is large, but from one model of all clients in the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from pf2lora.errors import UserError
from pf2lora.run.estimates import Estimate, estimate
from pf2lora.run.result import Result, SeedRun

TRAITS = {
    "difference": "half the distance of the client's label shares to the mean of all clients'",
    "rows": "its training rows",
    "difficulty": "the loss of one model of all clients on its test rows",
    "own share": "‖s̃·D_kC_k‖ / ‖s·BA‖",
}
LOSS = "loss"
FOR_ALL = ("centralized", "homlora")
"""Methods whose served model is one for all clients, learned without any of their adapters: the best such first."""


@dataclass(frozen=True)
class Point:
    """A client with one seed: its traits, its mean rank, and the rank in every layer by name."""

    run: str
    seed: int
    client: str
    traits: Mapping[str, float]
    rank: float
    layers: Mapping[str, int]


def points(result: Result, method: str) -> list[Point]:
    """The clients of a method's runs."""
    different = label_distances([client.labels for client in result.clients])
    hard = difficulties(result)
    found = []
    for run in result.methods[method].runs:
        last = next((record for record in reversed(run.rounds) if record.ranks is not None), None)
        if last is None or last.ranks is None:
            raise UserError(f"{result.title}: no round of {method} has learned ranks")
        for k, client in enumerate(result.clients):
            traits: dict[str, float | None] = {
                "difference": different[k],
                "rows": client.train,
                "difficulty": hard[k],
                "own share": last.client_share[k] if last.client_share else None,
            }
            known = {name: float(value) for name, value in traits.items() if value is not None}
            ranks = dict(zip(run.layers, last.ranks[k], strict=True))
            mean = float(np.mean(last.ranks[k]))
            found.append(Point(result.title, run.seed, client.name, known, mean, ranks))
    return found


def difficulties(result: Result) -> list[float | None]:
    """The loss of one model of all clients on each client's test rows, the mean over its seeds; None without one."""
    for name in FOR_ALL:
        runs = result.methods[name].runs if name in result.methods else ()
        losses = [run.served[LOSS].per_client for run in runs if LOSS in run.served]
        if losses:
            means = [estimate(of_client) for of_client in zip(*losses)]
            return [None if mean is None else mean.mean for mean in means]
    return [None] * len(result.clients)


def label_distances(labels: Sequence[Mapping[str, int]]) -> list[float | None]:
    """Half the sum of absolute differences between a client's label shares and the mean of all clients'."""
    names = sorted({name for of_client in labels for name in of_client})
    counts = np.array([[of_client.get(name, 0) for name in names] for of_client in labels], dtype=float)
    if not names or (counts.sum(1) == 0).any():
        return [None] * len(labels)
    shares = counts / counts.sum(1, keepdims=True)
    return [float(d) for d in np.abs(shares - shares.mean(0)).sum(1) / 2]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of ranks, ties with their mean rank; None where one side does not vary."""
    a, b = (mean_ranks(np.asarray(values, dtype=float)) for values in (first, second))
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Each value's place in the order, from 0; equal ones share the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def by_seed(found: Sequence[Point]) -> Iterator[list[Point]]:
    """The clients of each run and seed."""
    for _, group in groupby(sorted(found, key=lambda p: (p.run, p.seed)), lambda p: (p.run, p.seed)):
        yield list(group)


def correlations(found: Sequence[Point], layer: str | None = None) -> dict[str, Estimate | None]:
    """Spearman's ρ of the rank (the mean one, or that of a layer) with each trait: the mean over runs and seeds."""
    values: dict[str, Estimate | None] = {}
    for trait in TRAITS:
        each = [
            spearman(
                [p.traits[trait] for p in group],
                [p.rank if layer is None else p.layers[layer] for p in group],
            )
            for group in by_seed(found)
            if all(trait in p.traits and (layer is None or layer in p.layers) for p in group)
        ]
        values[trait] = estimate(rho for rho in each if rho is not None)
    return values


@dataclass(frozen=True)
class LayerRanks:
    """A layer's ranks: the mean over clients, how far apart the clients of a run are, and ρ; each over runs and
    seeds."""

    layer: str
    mean: Estimate
    range: Estimate
    rho: Mapping[str, Estimate | None]


def layer_ranks(found: Sequence[Point]) -> list[LayerRanks]:
    """Every layer of the runs, in the model's order."""
    layers = []
    for name in layer_names(found):
        groups = [[p.layers[name] for p in group if name in p.layers] for group in by_seed(found)]
        mean = estimate(float(np.mean(ranks)) for ranks in groups if ranks)
        apart = estimate(float(max(ranks) - min(ranks)) for ranks in groups if ranks)
        assert mean and apart
        layers.append(LayerRanks(name, mean, apart, correlations(found, name)))
    return layers


def layer_names(found: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(name for p in found for name in p.layers))


def over_seeds(found: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """The points of each client of each run; those whose labels differ most first."""
    order = sorted(found, key=lambda p: (p.run, -p.traits.get("difference", 0.0), p.client))
    return {key: list(group) for key, group in groupby(order, key=lambda p: (p.run, p.client))}


def two_level(result: Result) -> list[str]:
    """The methods of a result whose clients have adapters of their own."""
    return [name for name, method in result.methods.items() if any(map(_personal, method.runs))]


def _personal(run: SeedRun) -> bool:
    return run.parameters.client > 0
