"""Two tables of docs/reproduction.md, from stored runs alone: `python benchmarks/outcome_tables.py`.

What decides an outcome: the head, a bias per client, the measuring point and α beside each other on SST-2 and CoLA; and
what is stored of SQuAD beside the paper's Table 2. Runs nothing; what is not stored is a dash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from pages import ROOT, filled

from pf2lora.atomic import write_text
from pf2lora.reproduce.presets import load_preset
from pf2lora.reproduce.regret import records
from pf2lora.reproduce.regret.show import number
from pf2lora.reproduce.regret.variants import variants
from pf2lora.run.estimates import Estimate, estimate

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reproduction.md"
MADE_BY = "benchmarks/outcome_tables.py"
POINTS = {"served": "served", "before_averaging": "before averaging", "deploy": "deployed"}


class Column(NamedTuple):
    """A task with a model: the file with the head's variants, and those with α, where there are any."""

    title: str
    task: str
    metric: str
    runs: str
    alphas: tuple[str, ...] = ()
    points: tuple[str, ...] = tuple(POINTS)


COLUMNS = (
    Column("SST-2, MiniLM", "sst2-h0.9", "accuracy", "minilm_h200", ("alpha-sst2-minilm",)),
    Column(
        *("SST-2, mpnet", "sst2-h0.9", "accuracy", "mpnet_h200_default"),
    ),
    Column(
        *("CoLA, mpnet", "cola-h0.3", "matthews", "mpnet_h200"),
        alphas=tuple(f"alpha-cola-{which}-mpnet" for which in ("low", "high", "0.001", "0.3")),
    ),
)
HEADS = {
    "homlora": "HOMLoRA, shared head",
    "homlora-head": "HOMLoRA, personal head",
    "homlora-bias": "HOMLoRA, shared head and a bias per client and label",
    "pf2lora": "PF2LoRA, α found by the clients",
}
UNTUNED = {"pf2lora": "pf2lora-default"}  # what stands in its place where it was not tuned
ALPHAS = ("0.0001", "0.001", "0.01", "0.1", "0.3", "1")


@cache
def runs_of(name: str) -> records.Runs:
    return records.read([RESULTS / "regret" / f"{name}.jsonl"])


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf8"))


def percent(values: Iterable[float | None]) -> str:
    """A score's mean and deviation over seeds; a dash where there is none."""
    found = estimate(values)
    return "–" if found is None else number(scaled(found))


def scaled(value: Estimate) -> Estimate:
    deviation = None if value.deviation is None else 100 * value.deviation
    return replace(value, mean=100 * value.mean, deviation=deviation)


def run_of(column: Column, name: str) -> records.Run | None:
    runs = runs_of(column.runs)
    return runs.get((column.task, name)) or runs.get((column.task, UNTUNED.get(name, "")))


def of_variant(run: records.Run | None, metric: str, point: str) -> str:
    found = (seed.points.get(point) for seed in run.scores) if run else ()
    return percent(scores[metric].mean for scores in found if scores)


def of_alpha(column: Column, alpha: str, point: str) -> str:
    dataset = column.task.partition("-")[0]
    for name in column.alphas:
        for row in stored(f"tables/{name}")["rows"]:
            if (row["run"], row["quantity"]) == (f"{dataset}-{alpha}", column.metric):
                return "–" if row.get(point) is None else number(scaled(Estimate(**row[point])))
    return "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def outcomes() -> str:
    """A row for each head and each α, a column for each task and measuring point."""
    cells = [(column, point) for column in COLUMNS for point in column.points]
    rows = [
        [label, *(of_variant(run_of(column, name), column.metric, point) for column, point in cells)]
        for name, label in HEADS.items()
    ]
    rows += [
        [f"PF2LoRA, α = {float(alpha):g}", *(of_alpha(column, alpha, point) for column, point in cells)]
        for alpha in ALPHAS
    ]
    return table(["", *(f"{column.title}: {POINTS[point]}" for column, point in cells)], rows)


def squad() -> str:
    """The paper's Table 2 for SQuAD v2, then what is stored with a part of it."""
    metrics = ("f1", "exact_match", "answerable_f1", "unanswerable_f1")
    (paper,) = (run.paper for run in load_preset("squad").only(["squad-v2"]).runs)
    rows = [
        [f"{variants()[name].label}, paper", *(f"{100 * paper[m][name]:.1f}" for m in metrics[:2]), "–", "–"]
        for name in ("homlora", "hetlora", "pf2lora")
    ]
    for name, method in stored("qa_minilm")["methods"].items():
        scores = (percent([method["scores"][metric]]) for metric in metrics)
        rows.append([f"{variants()[name].label}, 100 rounds, one seed", *scores])
    for (task, _), run in runs_of("minilm_h200").items():
        if task == "squad":
            scores = (of_variant(run, metric, "served") for metric in metrics)
            rows.append([f"{variants()[run.variant].label}, tuned, 24 rounds", *scores])
    head = ["SQuAD v2, served", "F1", "exact match", "F1, answerable", "F1, unanswerable"]
    return table(head, rows)


def page_with_tables(page: str) -> str:
    """The page with both tables in their places."""
    for name, text in (("outcomes", outcomes()), ("squad", squad())):
        page = filled(page, f"{MADE_BY} ({name})", text)
    return page


if __name__ == "__main__":
    write_text(PAGE, page_with_tables(PAGE.read_text(encoding="utf8")))
