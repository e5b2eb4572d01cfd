"""What a preset is: a table or figure of the paper as runs with their settings and the paper's numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pf2lora.errors import unknown
from pf2lora.run.config import Config, from_dict, merged, to_dict

Paper = dict[str, dict[str, float]]
"""The paper's numbers by quantity (a metric, or a cost) and method, as the result has them: scores are fractions."""


@dataclass(frozen=True)
class Example:
    """A prompt of the paper's with what it says its methods wrote."""

    client: str
    prompt: str
    outputs: dict[str, str]


@dataclass(frozen=True)
class Run:
    """One experiment of a preset.

    `of` and `at` place it in a figure over a varied setting. With a `shape` (a transformers config), nothing is
    trained: parameters and operations are counted on a model of that shape, inputs being `length` tokens long.
    """

    name: str
    label: str
    config: Config
    paper: Paper
    show: tuple[str, ...]
    of: str
    at: float | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    length: int = 128

    def is_called(self, name: str) -> bool:
        """Whether `name` is its own, or that of all the values of its varied setting."""
        return self.name == name or (self.at is not None and self.name == f"{name}-{self.at:g}")


@dataclass(frozen=True)
class Grid:
    """A search for rates: `values` of each of a method's `rates` ("lr" where none are named)."""

    values: tuple[float, ...]
    rates: dict[str, tuple[str, ...]]

    def rates_of(self, method: str) -> tuple[str, ...]:
        return self.rates.get(method, ("lr",))


@dataclass(frozen=True)
class Preset:
    """A table or figure of the paper: `source` says which, `axis` is the varied setting's name."""

    name: str
    title: str
    source: str
    needs: tuple[str, ...]
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    percent: bool = False
    figure: str = "bars"
    axis: str = ""
    grid: Grid | None = None
    examples: tuple[Example, ...] = ()

    @property
    def counted(self) -> bool:
        """Whether nothing is trained."""
        return all(run.shape for run in self.runs)

    def only(self, names: Sequence[str]) -> Preset:
        """The preset with these runs alone; a varied setting's runs go by one name, too."""
        for name in names:
            if not any(run.is_called(name) for run in self.runs):
                raise unknown(f"run of {self.name}", name, [run.name for run in self.runs])
        kept = tuple(run for run in self.runs if any(map(run.is_called, names)))
        return replace(self, runs=kept) if names else self

    def with_settings(self, over: Mapping[str, Any]) -> Preset:
        """The preset with these config tables over those of every run."""
        return replace(self, runs=tuple(overridden(run, over) for run in self.runs)) if over else self


def overridden(run: Run, over: Mapping[str, Any]) -> Run:
    config = from_dict(merged(to_dict(run.config), over), "command line")
    if config.data.data_dir is not None and config.data.dataset is not None:
        folder = data_folder(Path(config.data.data_dir), config.data.dataset)
        config = replace(config, data=replace(config.data, data_dir=str(folder)))
    return replace(run, config=config)


def data_folder(root: Path, dataset: str) -> Path:
    """The folder of a data set in one that holds several: `e2e`, `webnlg2017`, `SQuAD_v2`; else `root` itself."""
    wanted = re.compile(rf"(glue)?{_plain(dataset)}(20\d\d)?")
    if not root.is_dir():
        return root
    return next((p for p in sorted(root.iterdir()) if p.is_dir() and wanted.fullmatch(_plain(p.name))), root)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def to_toml(preset: Preset) -> str:
    """The preset as a file that stands alone: every run with all of its settings."""
    import tomli_w

    grid = None
    if preset.grid is not None:
        rates = {method: list(names) for method, names in preset.grid.rates.items()}
        grid = {"values": list(preset.grid.values), "rates": rates}
    head = {
        "title": preset.title,
        "source": preset.source,
        "needs": list(preset.needs),
        "notes": list(preset.notes),
        "percent": preset.percent,
        "figure": preset.figure,
        "axis": preset.axis,
        "grid": grid,
        "examples": [vars(example) for example in preset.examples],
    }
    written = {key: value for key, value in head.items() if value}
    return tomli_w.dumps(written | {"runs": [_run_table(run, preset.percent) for run in preset.runs]})


def _run_table(run: Run, percent: bool) -> dict[str, Any]:
    times = 100 if percent else 1
    paper = {q: {m: float(f"{v * times:.8g}") for m, v in t.items()} for q, t in run.paper.items()}
    about: dict[str, Any] = {"name": run.name, "label": run.label, "of": run.of}
    about |= {} if run.at is None else {"at": run.at}
    about |= {"show": list(run.show)} if run.show else {}
    about |= {"paper": paper} if paper else {}
    about |= {"shape": run.shape, "length": run.length} if run.shape else {}
    return about | to_dict(run.config)
