"""What `pf2lora reproduce ranks` leaves behind: tables in Markdown, everything as JSON, and two figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pf2lora.reproduce.figures import STYLE, plain, save
from pf2lora.reproduce.markdown import table
from pf2lora.reproduce.ranks import (
    FOR_ALL,
    TRAITS,
    Point,
    correlations,
    layer_names,
    layer_ranks,
    over_seeds,
)
from pf2lora.run.estimates import Estimate, estimate


def to_json(found: Sequence[Point], method: str) -> dict[str, Any]:
    """Every point and every correlation, for programs."""
    rho = {trait: None if value is None else asdict(value) for trait, value in correlations(found).items()}
    layers = [asdict(layer) for layer in layer_ranks(found)]
    return {"method": method, "rho": rho, "layers": layers, "points": [asdict(p) for p in found]}


def markdown(found: Sequence[Point], method: str) -> str:
    """The correlations, every run's clients, every layer, and every client in every layer."""
    parts = [
        f"# What decides the rank ({method})",
        table(
            ["the rank against", "ρ", ""],
            [[trait, shown(rho, "+.2f"), TRAITS[trait]] for trait, rho in correlations(found).items()],
        ),
        "## By client",
        table(["run", "client", *TRAITS, "rank"], clients(found), numbers=True),
        "## By layer",
        table(
            ["layer", "mean rank", "apart", *(f"ρ with {trait}" for trait in TRAITS)],
            layers(found),
            numbers=True,
        ),
        *by_client_and_layer(found),
        "![The rank against each trait](ranks.svg)",
        "![Every client's rank in every layer](ranks-by-layer.svg)",
        "\n".join(f"- {note}" for note in notes(found)),
    ]
    return "\n\n".join(parts) + "\n"


def clients(found: Sequence[Point]) -> list[list[str]]:
    """Each client's traits and its rank, over seeds."""
    rows = []
    for (run, client), same in over_seeds(found).items():
        traits = [estimate(p.traits[t] for p in same if t in p.traits) for t in TRAITS]
        rank = shown(estimate(p.rank for p in same), ".2f")
        rows.append([run, client, *("–" if t is None else f"{t.mean:.3g}" for t in traits), rank])
    return rows


def layers(found: Sequence[Point]) -> list[list[str]]:
    """Each layer's ranks and what they follow, over runs and seeds."""
    return [
        [
            *(layer.layer, shown(layer.mean, ".2f"), shown(layer.range, ".2f")),
            *(shown(layer.rho[trait], "+.2f") for trait in TRAITS),
        ]
        for layer in layer_ranks(found)
    ]


def by_client_and_layer(found: Sequence[Point]) -> list[str]:
    """For each run a table of its clients' ranks in every layer, over seeds."""
    parts = []
    for run in dict.fromkeys(p.run for p in found):
        own = over_seeds([p for p in found if p.run == run])
        rows = [
            [name, *(shown(estimate(p.layers[name] for p in same), ".1f") for same in own.values())]
            for name in layer_names([p for p in found if p.run == run])
        ]
        parts += [f"### {run}", table(["layer", *(client for _, client in own)], rows, numbers=True)]
    return parts


def notes(found: Sequence[Point]) -> list[str]:
    told = [
        "numbers with ± are the mean and its deviation over seeds (ρ and layers: over runs and seeds)",
        "apart: the largest rank of a client less the smallest, in one run",
        "clients whose labels differ most come first",
    ]
    if bare := list(dict.fromkeys(p.run for p in found if "difficulty" not in p.traits)):
        told.append(
            f"{', '.join(bare)}: no difficulty, as its result has none of {' and '.join(FOR_ALL)}, a model of all "
            f"clients; run one beside the method"
        )
    return told


def shown(value: Estimate | None, form: str) -> str:
    if value is None:
        return "–"
    spread = "" if value.deviation is None else f" ± {value.deviation:{form.removeprefix('+')}}"
    return f"{value.mean:{form}}{spread}"


def draw(found: Sequence[Point], folder: Path) -> list[Path]:
    """The rank against each trait: a point for each client with its deviation over seeds, a colour for each run."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    traits = [trait for trait in TRAITS if any(trait in p.traits for p in found)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3 * len(traits), 3.4), layout="constrained")
        axes = figure.subplots(1, len(traits), sharey=True, squeeze=False)[0]
        for place, trait in zip(axes, traits):
            for run in dict.fromkeys(p.run for p in found):
                own = over_seeds([p for p in found if p.run == run and trait in p.traits]).values()
                at = [float(np.mean([p.traits[trait] for p in same])) for same in own]
                ranks = [[p.rank for p in same] for same in own]
                spread = [float(np.std(of, ddof=1)) if len(of) > 1 else 0.0 for of in ranks]
                means = [float(np.mean(of)) for of in ranks]
                place.errorbar(at, means, spread, fmt="o", markersize=4, elinewidth=0.9, label=run)
            place.set(xlabel=trait)
            plain(place)
        axes[0].set(ylabel="learned rank, mean over layers")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", frameon=False)
        return save(figure, folder, "ranks")


def draw_layers(found: Sequence[Point], folder: Path) -> list[Path]:
    """Every client's rank in every layer, the mean over seeds; the clients that differ most come first."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names, rows = layer_names(found), over_seeds(found)
    ranks = [
        [float(np.mean([p.layers.get(name, np.nan) for p in same])) for name in names]
        for same in rows.values()
    ]
    several = len({run for run, _ in rows}) > 1
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.4 + 0.28 * len(names), 1.6 + 0.22 * len(rows)), layout="constrained")
        place = figure.subplots()
        picture = place.imshow(ranks, aspect="auto", cmap="Blues")
        place.set_yticks(
            range(len(rows)), [f"{run}, {client}" if several else client for run, client in rows]
        )
        place.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        place.set_title("learned rank; the clients whose labels differ most first", loc="left")
        figure.colorbar(picture, ax=place)
        return save(figure, folder, "ranks-by-layer")
