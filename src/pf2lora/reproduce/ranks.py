"""What decides the rank: do learned ranks follow how different and how hard a client's data is?

Read from finished results: every client of every seed is a point. Its rank is the mean over layers of the paper's
90% rule for `s·BA + s̃·D_kC_k`; ρ is Spearman's, over the clients of one seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pf2lora.errors import UserError
from pf2lora.reproduce.figures import STYLE, plain, save
from pf2lora.run.estimates import Estimate, estimate
from pf2lora.run.result import Result, SeedRun

TRAITS = {
    "difference": "half the distance of the client's label shares to the mean of all clients'",
    "rows": "its training rows",
    "difficulty": "its test loss, served",
    "own share": "‖s̃·D_kC_k‖ / ‖s·BA‖",
}
LOSS = "loss"


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
    found = []
    for run in result.methods[method].runs:
        last = next((record for record in reversed(run.rounds) if record.ranks is not None), None)
        if last is None or last.ranks is None:
            raise UserError(f"{result.title}: no round of {method} has learned ranks")
        losses = run.served[LOSS].per_client if LOSS in run.served else [None] * len(result.clients)
        for k, client in enumerate(result.clients):
            traits: dict[str, float | None] = {
                "difference": different[k],
                "rows": client.train,
                "difficulty": losses[k],
                "own share": (last.client_share or losses)[k] if last.client_share else None,
            }
            known = {name: float(value) for name, value in traits.items() if value is not None}
            ranks = dict(zip(run.layers, last.ranks[k], strict=True))
            mean = float(np.mean(last.ranks[k]))
            found.append(Point(result.title, run.seed, client.name, known, mean, ranks))
    return found


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
    """A layer's ranks: their mean, how far apart the clients of a run are (mean over runs and seeds), and ρ."""

    layer: str
    mean: float
    range: float
    rho: Mapping[str, Estimate | None]


def layer_ranks(found: Sequence[Point]) -> list[LayerRanks]:
    """Every layer of the runs, in the model's order."""
    layers = []
    for name in dict.fromkeys(name for p in found for name in p.layers):
        groups = [[p.layers[name] for p in group if name in p.layers] for group in by_seed(found)]
        ranges = [max(ranks) - min(ranks) for ranks in groups if ranks]
        mean = float(np.mean([rank for ranks in groups for rank in ranks]))
        layers.append(LayerRanks(name, mean, float(np.mean(ranges)), correlations(found, name)))
    return layers


def to_json(found: Sequence[Point], method: str) -> dict[str, Any]:
    """Every point and every correlation, for programs."""
    rho = {trait: None if value is None else asdict(value) for trait, value in correlations(found).items()}
    layers = [asdict(layer) for layer in layer_ranks(found)]
    return {"method": method, "rho": rho, "layers": layers, "points": [asdict(p) for p in found]}


def markdown(found: Sequence[Point], method: str) -> str:
    """The correlations, and every run's clients."""
    lines = [
        f"# What decides the rank ({method})",
        "",
        "| the rank against | ρ, mean ± deviation over runs and seeds | |",
        "| --- | ---: | --- |",
    ]
    for trait, rho in correlations(found).items():
        lines.append(f"| {trait} | {shown(rho)} | {TRAITS[trait]} |")
    lines += ["", "| run | client | " + " | ".join(TRAITS) + " | rank |", "| --- " * (len(TRAITS) + 3) + "|"]
    order = sorted(found, key=lambda p: (p.run, p.client))
    for (run, client), group in groupby(order, key=lambda p: (p.run, p.client)):
        same = list(group)
        cells = [mean_of([p.traits[trait] for p in same if trait in p.traits]) for trait in TRAITS]
        lines.append(f"| {run} | {client} | {' | '.join(cells)} | {mean_of([p.rank for p in same])} |")
    lines += ["", f"| layer | mean rank | apart | {' | '.join(f'ρ with {trait}' for trait in TRAITS)} |"]
    lines.append("| --- |" + " ---: |" * (len(TRAITS) + 2))
    for layer in layer_ranks(found):
        cells = [shown(layer.rho[trait]) for trait in TRAITS]
        lines.append(f"| {layer.layer} | {layer.mean:.2f} | {layer.range:.2f} | {' | '.join(cells)} |")
    lines += [
        "",
        "apart: the largest rank of a client less the smallest, in one run; the mean over runs and seeds.",
    ]
    return "\n".join(lines) + "\n"


def shown(value: Estimate | None) -> str:
    if value is None:
        return "–"
    return f"{value.mean:+.2f}" + ("" if value.deviation is None else f" ± {value.deviation:.2f}")


def mean_of(values: Sequence[float]) -> str:
    return "–" if not values else f"{np.mean(values):.3g}"


def draw(found: Sequence[Point], folder: Path) -> list[Path]:
    """The rank against each trait, a colour for each run."""
    import matplotlib.pyplot as plt

    traits = [trait for trait in TRAITS if any(trait in p.traits for p in found)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(traits), figsize=(3 * len(traits), 3), sharey=True, squeeze=False, layout="constrained"
        )
        for place, trait in zip(axes[0], traits):
            for run in dict.fromkeys(p.run for p in found):
                own = [p for p in found if p.run == run and trait in p.traits]
                place.scatter([p.traits[trait] for p in own], [p.rank for p in own], s=12, label=run)
            place.set(xlabel=trait)
            plain(place)
        axes[0][0].set(ylabel="learned rank, mean over layers")
        axes[0][0].legend(frameon=False, fontsize=6)
        return save(figure, folder, "ranks")


def draw_layers(found: Sequence[Point], folder: Path) -> list[Path]:
    """Every client's rank in every layer, the mean over seeds; the clients that differ most come first."""
    import matplotlib.pyplot as plt

    layers = list(dict.fromkeys(name for p in found for name in p.layers))
    rows: dict[tuple[str, str], list[float]] = {}
    order = sorted(found, key=lambda p: (-p.traits.get("difference", 0.0), p.run, p.client))
    for key in dict.fromkeys((p.run, p.client) for p in order):
        same = [p for p in found if (p.run, p.client) == key]
        rows[key] = [float(np.mean([p.layers.get(name, np.nan) for p in same])) for name in layers]
    several = len({run for run, _ in rows}) > 1
    with plt.rc_context(STYLE):
        size = (2.4 + 0.28 * len(layers), 1.6 + 0.22 * len(rows))
        figure, place = plt.subplots(figsize=size, layout="constrained")
        picture = place.imshow(list(rows.values()), aspect="auto", cmap="Blues")
        place.set_yticks(
            range(len(rows)), [f"{run}, {client}" if several else client for run, client in rows]
        )
        place.set_xticks(range(len(layers)), layers, rotation=90, fontsize=6)
        place.set_title("learned rank; the clients whose labels differ most first", loc="left")
        figure.colorbar(picture, ax=place)
        return save(figure, folder, "ranks-by-layer")


def two_level(result: Result) -> list[str]:
    """The methods of a result whose clients have adapters of their own."""
    return [name for name, method in result.methods.items() if any(map(_personal, method.runs))]


def _personal(run: SeedRun) -> bool:
    return run.parameters.client > 0
