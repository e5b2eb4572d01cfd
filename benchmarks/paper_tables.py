"""The paper's tables beside ours in docs/reproduction.md, from stored runs alone: `python benchmarks/paper_tables.py`.

The paper's numbers are those of the presets. Runs nothing; what is not stored is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pages import ROOT, filled
from stored_rows import NONE, POINTS, configs, percent, preset_rows, table

from pf2lora.atomic import write_text
from pf2lora.methods import METHODS
from pf2lora.reproduce.presets import load_preset
from pf2lora.run.estimates import Estimate

PAGE = ROOT / "docs" / "reproduction.md"
MADE_BY = "benchmarks/paper_tables.py"
SECOND_RATES = ("client_lr", "adaptation_lr")  # what stands behind the slash in the paper's tables of rates


class Run(NamedTuple):
    """A preset's run of the paper, and where ours is stored: the first file that has a method is taken."""

    title: str
    preset: str
    name: str
    quantity: str
    files: tuple[str, ...]


HEADS = ("rates", "paper", "served", "before averaging")
MORE_PARAMETERS = ("homlora", "per-fedavg", "hetlora", "pf2lora", "pf2lora-joint")
RUNS = {
    "glue": (
        Run("SST-2", "glue-roberta-base", "sst2", "accuracy", ("glue-mpnet",)),
        Run("CoLA", "glue-roberta-base", "cola", "matthews", ("glue-mpnet",)),
    ),
    "more parameters": (
        Run("SST-2", "more-parameters", "sst2", "accuracy", ("more-parameters-minilm", "bilevel-minilm")),
        Run(
            *("CoLA", "more-parameters", "cola", "matthews"),
            ("more-parameters-cola-mpnet", "more-parameters-cola-two-level-mpnet", "bilevel-cola-mpnet"),
        ),
    ),
}
LEVELS = {
    "heterogeneity, SST-2": (
        Run("SST-2", "heterogeneity", "sst2", "accuracy", ("heterogeneity-sst2-minilm",)),
        ("0.3", "0.5", "0.6", "0.7", "0.9", "1"),
    ),
    "heterogeneity, CoLA": (
        Run(
            *("CoLA", "heterogeneity-cola", "cola", "matthews"),
            ("heterogeneity-cola-mpnet", "heterogeneity-cola-0.9-mpnet", "heterogeneity-cola-1-mpnet"),
        ),
        ("0.2", "0.3", "0.4", "0.5", "0.7", "0.9", "1"),
    ),
}
ALPHAS = ("0.0001", "0.001", "0.01", "0.1", "0.3", "1")
RANKS = ("4", "6", "8", "12", "16")
SENSITIVITY = {
    "alpha": (
        ALPHAS,
        (
            Run("SST-2", "", "sst2", "accuracy", ("alpha-sst2-minilm",)),
            Run(
                *("CoLA", "", "cola", "matthews"),
                tuple(f"alpha-cola-{which}-mpnet" for which in ("low", "high", "0.001", "0.3")),
            ),
        ),
    ),
    "rank": (
        RANKS,
        (
            Run("SST-2", "", "sst2", "accuracy", ("rank-sst2-minilm",)),
            Run(
                *("CoLA", "", "cola", "matthews"),
                (*(f"rank-cola-{r}-mpnet" for r in ("4", "6", "12", "16")), "bilevel-cola-mpnet"),
            ),
        ),
    ),
}
SMOLLM2 = ("e2e-smollm2", "webnlg-smollm2", "webnlg-pf2lora-smollm2", "webnlg-auto-smollm2")


def found(run: Run, name: str, method: str, quantity: str = "") -> tuple[str, Mapping[str, Estimate | None]]:
    """The points of a method in the run called `name`, and the file that has them."""
    for file in run.files:
        for row in preset_rows(file):
            if (row.run, row.method, row.quantity) == (name, method, quantity or run.quantity):
                return file, row.points
    return "", {}


def paper(run: Run, name: str, method: str) -> float | None:
    runs = {one.name: one for one in load_preset(run.preset).runs}
    return runs[name].paper.get(run.quantity, {}).get(method) if name in runs else None


def of_paper(value: float | None, decimals: int = 1) -> str:
    """In percent; a quantity with three decimals is between 0 and 1 in the paper, too."""
    return NONE if value is None else f"{value:.4f}" if decimals == 3 else f"{100 * value:.2f}"


def shown(value: Estimate | None, decimals: int) -> str:
    if value is None or decimals == 1:
        return percent(value)
    return f"{value.mean:.3f} ± {value.deviation or 0:.3f}"


def rates(config: Mapping[str, Any] | None, method: str) -> str:
    """`lr`, and after a slash the second rate that the method has, as the paper's tables of rates."""
    if config is None:
        return NONE
    own = config["methods"].get(method, {})
    values = [own.get("lr", config["training"]["lr"]), *(own[name] for name in SECOND_RATES if name in own)]
    return " / ".join(value if isinstance(value, str) else f"{value:g}" for value in values)


def preset_config(run: Run) -> Mapping[str, Any]:
    """The preset's settings, for files of rows alone: only rounds were changed in those."""
    (one,) = load_preset(run.preset).only([run.name]).runs
    return {"methods": one.config.methods, "training": {"lr": one.config.training.lr}}


def cells(run: Run, method: str, published: float | None, decimals: int = 1) -> list[str]:
    """Of a method in a run: the rates, the paper's number, and ours at both points."""
    file, ours = found(run, run.name, method)
    config = configs(file).get(run.name) or preset_config(run) if file else None
    points = (shown(ours.get(point), decimals) for point in ("served", "before_averaging"))
    return [rates(config, method), of_paper(published, decimals), *points]


def methods_table(runs: Sequence[Run], methods: Sequence[str]) -> str:
    """A row per method."""
    rows = [
        [METHODS[m].label, *(cell for run in runs for cell in cells(run, m, paper(run, run.name, m)))]
        for m in methods
    ]
    return table(["", *(f"{run.title}: {head}" for run in runs for head in HEADS)], rows)


def levels_table(run: Run, levels: Sequence[str]) -> str:
    """The paper's numbers by heterogeneity, then ours; accuracies too, where they are not what is compared."""
    methods = ("homlora", "per-fedavg", "hetlora", "pf2lora")
    labels = {name: METHODS[name].label for name in methods} | {"pf2lora": "PF2LoRA"}
    names = [f"{run.name}-{level}" for level in levels]
    rows = [
        [f"{labels[method]}, paper", *(of_paper(paper(run, name, method)) for name in names)]
        for method in methods
    ]
    wanted = [(run.quantity, point) for point in ("served", "before_averaging")]
    if run.quantity != "accuracy":
        wanted.append(("accuracy", "served"))
    for quantity, point in wanted:
        which = POINTS[point] + (f", {quantity}" if quantity != run.quantity else "")
        for method in ("homlora", "hetlora", "pf2lora"):
            ours = (found(run, name, method, quantity)[1] for name in names)
            own = ", α found" if method == "pf2lora" else ""
            rows.append([f"{labels[method]}{own}, {which}", *(percent(points.get(point)) for points in ours)])
    return table(["", *(f"h = {level}" for level in levels)], rows)


def sensitivity_table(values: Sequence[str], runs: Sequence[Run], symbol: str) -> str:
    rows = []
    for run in runs:
        # the run of Figure 3, which has a value's settings, is called by the data set alone
        ours = [
            found(run, f"{run.name}-{v}", "pf2lora")[1] or found(run, run.name, "pf2lora")[1] for v in values
        ]
        for point in ("served", "before_averaging"):
            rows.append([f"{run.title}, {POINTS[point]}", *(percent(points.get(point)) for points in ours)])
    return table(["", *(f"{symbol} = {float(value):g}" for value in values)], rows)


def generation_table() -> str:
    """BLEU; the runs with α found by the clients are the presets' own and not the paper's."""
    tasks = {"e2e": ("E2E", "e2e-gpt2-medium"), "webnlg": ("WebNLG", "webnlg-gpt2-medium")}
    rows = []
    for method, suffix in (("homlora", ""), ("hetlora", ""), ("pf2lora", ""), ("pf2lora", "-auto")):
        line = [METHODS[method].label + (", α found" if suffix else "")]
        for task, (title, preset) in tasks.items():
            run = Run(title, preset, task + suffix, "BLEU", SMOLLM2)
            line += cells(run, method, paper(run, run.name, method), 3)
        rows.append(line)
    return table(["BLEU", *(f"{title}: {head}" for title, _ in tasks.values() for head in HEADS)], rows)


def tables() -> dict[str, str]:
    glue = ("centralized", *MORE_PARAMETERS[:-1])
    made = {
        "glue": methods_table(RUNS["glue"], glue),
        "more parameters": methods_table(RUNS["more parameters"], MORE_PARAMETERS),
        "generation": generation_table(),
    }
    made |= {name: levels_table(*of) for name, of in LEVELS.items()}
    symbols = {"alpha": "α", "rank": "r"}
    return made | {name: sensitivity_table(*of, symbols[name]) for name, of in SENSITIVITY.items()}


def page_with_tables(page: str) -> str:
    for name, text in tables().items():
        page = filled(page, f"{MADE_BY} ({name})", text)
    return page


if __name__ == "__main__":
    write_text(PAGE, page_with_tables(PAGE.read_text(encoding="utf8")))
