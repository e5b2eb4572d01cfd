"""Tables of docs/reproduction.md from the stored runs of the regret, beside which there is α: `python
benchmarks/outcome_tables.py`.

The promise task by task; distances to the best; what decides an outcome (the head, a bias per client, the measuring
point and α beside each other on SST-2 and CoLA); and what is stored of SQuAD beside the paper's Table 2. Runs nothing;
what is not stored is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pages import ROOT, filled
from stored_rows import NONE, POINTS, percent, preset_rows, regret_runs, stored, table

from pf2lora.atomic import write_text
from pf2lora.reproduce.presets import load_preset
from pf2lora.reproduce.regret import records
from pf2lora.reproduce.regret.show import UNITS, number
from pf2lora.reproduce.regret.summary import PointSummary, at_point
from pf2lora.reproduce.regret.tasks import TASKS
from pf2lora.reproduce.regret.variants import variants
from pf2lora.run.estimates import Estimate, estimate

PAGE = ROOT / "docs" / "reproduction.md"
MADE_BY = "benchmarks/outcome_tables.py"


# --- the promise, and distances to the best ----------------------------------------------------------------

EIGHT = (
    "minilm_h200",
    "minilm_h200_lr_1e-3",
)  # the second has what guessing scores, which the first was made before
NOTHING_SET = {
    "minilm_h200_default": ("sst2-h0.9", "sst2-few", "sst2-h0.3", "vader", "sst2-flipped", "sst2-shifted"),
    "minilm_h200_default_before": ("reviews-dirichlet", "squad"),
}
SMALL = {task: ("minilm_h200", file) for file, tasks in NOTHING_SET.items() for task in tasks}
OF_40_ROUNDS = "mpnet_h200_default_40_rounds"
LARGER = {
    "sst2-h0.9": ("mpnet_h200_default",),
    "sst2-few": ("mpnet_h200_default",),
    "cola-h0.3": ("mpnet_h200", OF_40_ROUNDS),
    "cola-h0.9": ("mpnet_h200", OF_40_ROUNDS),
    "vader": ("mpnet_h200_first_rule", OF_40_ROUNDS),
    "sst2-flipped": ("mpnet_h200_first_rule", OF_40_ROUNDS),
}
GENERATION = {"e2e": ("generation_h200",), "webnlg": ("generation_h200",)}
MODELS = {"minilm": "MiniLM", "mpnet": "mpnet", "smollm2": "SmolLM2"}
ALONE = (
    (
        "minilm_h200_default_before",
        "minilm_h200_default",
        "pf2lora-default",
        NOTHING_SET["minilm_h200_default"],
    ),
    ("generation_h200_before", "generation_h200", "homlora", ("webnlg",)),
)
"""Runs with the full rate in steps alone and with the smaller one, of one variant, with the same rates otherwise."""
GOAL = 1.0  # points from the best
CHANGED = "2026-11-19T23:40"  # until then steps alone had the full rate
SHORT = {
    "sst2-h0.9": "SST-2, 0.9",
    "sst2-few": "SST-2, 100 rows",
    "sst2-h0.3": "SST-2, 0.3",
    "cola-h0.3": "CoLA, 0.3",
    "cola-h0.9": "CoLA, 0.9",
    "vader": "four domains",
    "reviews-dirichlet": "reviews",
    "sst2-flipped": "flipped labels",
    "sst2-shifted": "other meaning",
    "squad": "SQuAD v2 (part)",
    "e2e": "E2E",
    "webnlg": "WebNLG",
}
SHOWN_OF_EIGHT = (
    *(
        "homlora-head",
        "fedsa-lora",
        "homlora-alone",
        "feddpa-t",
        "pf2lora-joint",
        "pf2lora",
        "pf2lora-default",
    ),
    *("per-fedavg", "homlora-bias", "local", "homlora", "hetlora", "centralized"),
)
AUTO = {"pf2lora": "PF2LoRA, auto", "pf2lora-joint": "PF2LoRA without bilevel, auto"}
BEFORE = {"pf2lora-default": "PF2LoRA, auto, lr 1e-3 (the default before)"}
SHOWN_OF_LARGER = (
    *("pf2lora", "pf2lora-layer", "homlora", "hetlora", "homlora-alone", "local"),
    *("homlora-head", "homlora-bias", "fedsa-lora"),
)
SHOWN_OF_GENERATION = ("pf2lora", "homlora", "hetlora", "homlora-alone", "local")
OURS = ("pf2lora-default", "pf2lora")  # the first where both were run


def label(name: str, other: Mapping[str, str] = AUTO) -> str:
    return other.get(name, variants()[name].label)


def ran(task: str, names: Sequence[str]) -> str:
    """The variant that is PF2LoRA in these files on a task; none where it was not run."""
    ours = OURS[::-1] if names == EIGHT else OURS  # there the untuned one has the rate of before
    return next((name for name in ours if (task, name) in regret_runs(*names)), "")


def promise() -> str:
    """For each task and model: how far PF2LoRA is from the best of all, and with which rate in steps alone."""
    rows = []
    for task in SHORT:
        rows += [promised(task, of[task]) for of in (SMALL, LARGER, GENERATION) if task in of]
    head = (
        "task",
        "model",
        "best",
        "of",
        "deployed: behind by",
        "served: behind by",
        "kept",
        "lr; rate of steps alone",
    )
    return table(head, rows)


def promised(task: str, names: Sequence[str]) -> list[str]:
    runs = regret_runs(*names)
    deployed, served = (at_point(runs, point) for point in ("deploy", "served"))
    name, best = ran(task, names), deployed.best[task]
    run, distance = runs[task, name], deployed.cells[task][name].distance
    lr = run.rates["lr"]
    # a variant about the head is another one's run where there is none
    compared = {run_behind(task, of) for of in deployed.cells[task] if of == name or of not in OURS}
    return [
        SHORT[task] + ("" if deployed.learned(task) else " (!)"),
        MODELS[run.base_model],
        f"{label(best)}, {score(deployed, task, best)}",
        str(len(compared)),
        number(distance),
        number(served.cells[task][name].distance),
        within(distance),
        f"lr {lr:g}; {'1/√K' if run.created > CHANGED else 'full'}",
    ]


def run_behind(task: str, name: str) -> tuple[str, str]:
    """The run that has a variant's scores on a task, and the candidate of it: several variants may have the same."""
    variant = variants()[name]
    return variant.run_by(TASKS[task].has_head), variant.candidate


def score(summary: PointSummary, task: str, name: str) -> str:
    """In the task's unit; a loss is in nats, which the summary has a hundred times."""
    found = summary.cells[task][name].score
    unit = TASKS[task].metric
    if unit == "loss":
        return f"{found.mean / 100:.3f} nats a token"
    return f"{found.mean:.1f}" + ("" if unit == "accuracy" else f" ({UNITS[unit]})")


def within(distance: Estimate) -> str:
    """Whether the promise is kept; where the limit lies within the spread, that is said, too."""
    told = "yes" if distance.mean <= GOAL else "**no**"
    close = distance.deviation is not None and abs(distance.mean - GOAL) < distance.deviation
    return f"{told}, within its spread" if close else told


def distances(files: Mapping[str, Sequence[str]], point: str, shown: Sequence[str], **other: str) -> str:
    """A row per variant, a column per task: how far it is from the best, and with which rate. Tasks that are all of the
    same files have the largest distance and the mean in place of rates."""
    summaries = {task: at_point(regret_runs(*names), point) for task, names in files.items()}
    together = len(set(files.values())) == 1 and len(files) > len(GENERATION)
    rows = [["best score", *(number(s.cells[t][s.best[t]].score) for t, s in summaries.items())]]
    if any(summary.trivial for summary in summaries.values()):
        guesses = (f"{s.trivial[t]:.1f}" if t in s.trivial else "" for t, s in summaries.items())
        rows.append(["without looking at the text", *guesses])
    for name in shown:
        line, found = [label(name, AUTO | other)], []
        for task, summary in summaries.items():
            of = ran(task, files[task]) if name == "pf2lora" else name
            if of not in summary.cells[task]:
                line.append("not run")
                continue
            best, distance = summary.best[task] == of, summary.cells[task][of].distance
            rate = regret_runs(*files[task])[task, run_behind(task, of)[0]].rates["lr"]
            line.append(("**best**" if best else number(distance)) + ("" if together else f" ({rate:g})"))
            found.append(distance.mean)
        rows.append(line + [f"{max(found):.1f}", f"{fmean(found):.1f}"] * together)
    head = ["", *(SHORT[task] for task in files), *(["regret", "mean"] if together else [])]
    return table(head, [row + [""] * (len(head) - len(row)) for row in rows])


def steps_alone() -> str:
    """What steps alone after the last average came to, and what clients deployed, by the rate of these steps."""
    rows = []
    for before, after, name, tasks in ALONE:
        for task in tasks:
            points = []
            for run in (regret_runs(file)[task, name] for file in (before, after)):
                offered = [{**seed.candidates, "deploy": seed.points["deploy"]} for seed in run.scores]
                for point in ("served", "personal_steps", "deploy"):
                    values = (seed[point][TASKS[task].metric].mean for seed in offered)
                    points.append(percent(estimate(values)))
            rows.append([f"{SHORT[task]}, {MODELS[run.base_model]}, {label(name)}", *points])
    kinds = ("served", "steps alone", "deployed")
    return table(["", *(f"{rate}: {kind}" for rate in ("full", "1/√K") for kind in kinds)], rows)


# --- what decides an outcome -------------------------------------------------------------------------------


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


def run_of(column: Column, name: str) -> records.Run | None:
    runs = regret_runs(column.runs)
    return runs.get((column.task, name)) or runs.get((column.task, UNTUNED.get(name, "")))


def of_variant(run: records.Run | None, metric: str, point: str) -> str:
    found = (seed.points.get(point) for seed in run.scores) if run else ()
    return percent(estimate(scores[metric].mean for scores in found if scores))


def of_alpha(column: Column, alpha: str, point: str) -> str:
    dataset = column.task.partition("-")[0]
    for name in column.alphas:
        for row in preset_rows(name):
            if (row.run, row.quantity) == (f"{dataset}-{alpha}", column.metric):
                return percent(row.points.get(point))
    return NONE


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
        scores = (percent(estimate([method["scores"][metric]])) for metric in metrics)
        rows.append([f"{variants()[name].label}, 100 rounds, one seed", *scores])
    for (task, _), run in regret_runs("minilm_h200").items():
        if task == "squad":
            scores = (of_variant(run, metric, "served") for metric in metrics)
            rows.append([f"{variants()[run.variant].label}, tuned, 24 rounds", *scores])
    head = ["SQuAD v2, served", "F1", "exact match", "F1, answerable", "F1, unanswerable"]
    return table(head, rows)


def tables() -> dict[str, str]:
    eight = {task: EIGHT for task in SHORT if ran(task, EIGHT)}
    made = {"promise": promise(), "eight tasks": distances(eight, "deploy", SHOWN_OF_EIGHT, **BEFORE)}
    for point in ("deploy", "served"):
        made[f"larger model, {POINTS[point]}"] = distances(LARGER, point, SHOWN_OF_LARGER)
        made[f"generation, {POINTS[point]}"] = distances(GENERATION, point, SHOWN_OF_GENERATION)
    made["steps alone"] = steps_alone()
    return made | {"outcomes": outcomes(), "squad": squad()}


def page_with_tables(page: str) -> str:
    """The page with its tables in their places."""
    for name, text in tables().items():
        page = filled(page, f"{MADE_BY} ({name})", text)
    return page


if __name__ == "__main__":
    write_text(PAGE, page_with_tables(PAGE.read_text(encoding="utf8")))
