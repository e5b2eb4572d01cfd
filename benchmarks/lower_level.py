"""Which rule for the lower level's size is never far from the best method? Tries rules on a few tasks, a line each.

    python benchmarks/models.py --models mpnet --out carry
    python benchmarks/lower_level.py --model carry/mpnet --data ../shared/data --out lower_level.jsonl
    python benchmarks/lower_level.py --read lower_level.jsonl
    python benchmarks/lower_level.py --list

A run that is finished is a line of --out, so it can be stopped at any time. At the end, and with --read, a table: every
rule's distance to the best of all rules on each task, and the largest of these, its regret. The rules that were tried,
and what came of them, are in docs/lower-level.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from pf2lora.engines.bad_clients import Diverged
from pf2lora.methods import own_size
from pf2lora.run.comparison import compare, prepare
from pf2lora.run.config import from_settings
from pf2lora.run.result import Result
from pf2lora.run.workload import Workload

DOMAINS = {
    "tweets": "tweets",
    "film": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
}

Settings = dict[str, Any]


def below(kind: str, **settings: Any) -> Settings:
    """The settings of a run with a class of `lower_level_rules.py`; `settings` are the rule's own."""
    method = f"lower_level_rules:{kind}"
    return {"method": [method], "methods": {method: settings}}


RULES: dict[str, tuple[Settings, dict[str, Any]]] = {
    "homlora": ({"method": ["homlora"]}, {}),
    "personal head": ({"method": ["homlora"], "head": "personal"}, {}),
    "local": ({"method": ["local"]}, {}),
    "hetlora": ({"method": ["hetlora"]}, {}),
    "auto": ({}, {}),
    # what is there, otherwise
    "no bias": ({"client_bias": False}, {}),
    "head layer": ({"client_layer": True}, {}),
    "larger": ({}, {"ALPHA": 0.3}),
    "smaller": ({}, {"ALPHA": 0.03}),
    "short steps": ({}, {"ALPHA": 1.0, "LONGEST": 0.1}),
    "normalised": ({}, {"ALPHA": 1e4, "LONGEST": 0.1}),
    "bias alone": ({"client_rank": 0}, {"ALPHA": 1.0, "LONGEST": 1e9}),
    "fixed 0.03": ({"client_lr": 0.03}, {}),
    "never dropped": ({}, {"NONE": 0.3}),
    "sized every round": (below("Seldom", between=1), {}),
    "sized every 20 steps": (below("Seldom", between=20), {}),
    "sized every 40 steps": (below("Seldom", between=40), {}),
    "sized when served": (below("Rule", rescale="served"), {}),
    "sized when served, smaller": (below("Rule", rescale="served"), {"ALPHA": 0.03}),
    "never sized": (below("Rule", rescale="never"), {}),
    # other steps of y
    "own rate": (below("OwnRate"), {}),
    "own rate, D uncut": (below("OwnRate", rescale="served"), {}),
    "own rate, decay": (below("OwnRate", decay=10.0), {}),
    "cumulative 0.3": (below("CumulativeNorm", c=0.3), {}),
    "cumulative 1": (below("CumulativeNorm"), {}),
    "cumulative 3": (below("CumulativeNorm", c=3.0), {}),
    "cumulative 1, D uncut": (below("CumulativeNorm", rescale="served"), {}),
    "polyak": (below("CappedPolyak"), {}),
    "polyak 0.1": (below("CappedPolyak", most=0.1), {}),
    "adam 0.1": (below("AdamBelow", kappa=0.1), {}),
    "adam 0.3": (below("AdamBelow"), {}),
    "adam 0.3, D uncut": (below("AdamBelow", rescale="served"), {}),
    "adam 0.3, decay 100": (below("AdamBelow", decay=100.0), {}),
    "prodigy": (below("ProdigyBelow"), {}),
    "prodigy, decay": (below("ProdigyBelow", decay=10.0), {}),
    "lower after": (below("LowerAfter"), {}),
    "decay 10": (below("Decay", decay=10.0), {}),
    "decay 30": (below("Decay"), {}),
    "decay 100": (below("Decay", decay=100.0), {}),
    "decay 30, D uncut": (below("Decay", rescale="served"), {}),
}
"""What is run: settings, and values of `methods/own_size.py`."""

MORE = ("cola 0.9", "sst2 0.3")  # tasks that are run where they are named
UNTOLD = 1e-3  # the rate of x of lines that do not name theirs
POINTS: tuple[Literal["served", "before_averaging", "deploy"], ...] = ("served", "before_averaging", "deploy")


def vader(data: Path, out: Path) -> list[str]:
    """The four natural domains, |valence| ≥ 0.3."""
    files = []
    for name, source in DOMAINS.items():
        text = (data / "vader" / f"{source}_GroundTruth.txt").read_text(encoding="utf8", errors="replace")
        rows = [line.split("\t") for line in text.splitlines() if line.count("\t") >= 2]
        strong = [(r[2], float(r[1])) for r in rows if abs(float(r[1])) >= 0.3]
        kept = [{"text": text, "label": "positive" if v > 0 else "negative"} for text, v in strong]
        files.append(write(out / "vader" / f"{name}.jsonl", kept))
    return files


def flipped(data: Path, out: Path) -> tuple[list[str], list[str]]:
    """SST-2 on eight clients; the labels of every other client are the opposite ones."""
    rows = {}
    for part in ("train", "dev"):
        lines = (data / "glue_sst2" / f"{part}.tsv").read_text(encoding="utf8").splitlines()[1:]
        rows[part] = [line.rsplit("\t", 1) for line in lines]
        random.Random(0).shuffle(rows[part])
    files: dict[str, list[str]] = {"train": [], "dev": []}
    for k in range(8):
        for part, count in (("train", 1000), ("dev", 109)):
            own = rows[part][k * count : (k + 1) * count]
            labelled = [
                {"text": t, "label": label if k % 2 == 0 else str(1 - int(label))} for t, label in own
            ]
            files[part].append(write(out / "flipped" / part / f"c{k}.jsonl", labelled))
    return files["train"], files["dev"]


def write(file: Path, rows: list[dict[str, str]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return str(file)


def tasks(data: Path, out: Path) -> dict[str, Settings]:
    """The tasks' settings."""
    train, test = flipped(data, out)
    sst2 = {"dataset": "sst2", "data_dir": str(data / "glue_sst2")}
    cola = {"dataset": "cola", "data_dir": str(data / "glue_cola")}
    return {
        "sst2 few": sst2 | {"heterogeneity": 0.9, "limit": 100, "rounds": 30},
        "cola 0.3": cola | {"heterogeneity": 0.3, "rounds": 60},
        "vader": {"clients": vader(data, out), "rounds": 60},
        "sst2 0.9": sst2 | {"heterogeneity": 0.9, "rounds": 60, "limit": 2000},
        "flipped": {"clients": train, "test": test, "rounds": 30},
        "cola 0.9": cola | {"heterogeneity": 0.9, "rounds": 60},
        "sst2 0.3": sst2 | {"heterogeneity": 0.3, "rounds": 60, "limit": 2000},
    }


def runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ends = time.monotonic() + 60 * options.minutes
    shared = {
        "model": options.model,
        "steps": 10,
        "batch_size": 16,
        "max_length": 64,
        "seeds": options.seeds,
        "precision": options.precision,
        "hypergradient_mode": "none",
        "lr": options.lr,
        "evaluate_every": options.every,
        "strict": True,
        "method": ["pf2lora"],
    }
    if options.rounds:
        shared["rounds"] = options.rounds
    known = tasks(options.data, options.work)
    if missing := [name for name in options.tasks or () if name not in known]:
        raise SystemExit(f"no task is called {missing[0]!r}; there are {', '.join(known)}")
    workloads: dict[str, Workload] = {}
    for rule in options.rules or RULES:
        settings, values = RULES[rule]
        for task in options.tasks or [name for name in known if name not in MORE]:
            if time.monotonic() > ends:
                return
            config = from_settings(known[task] | shared | settings, rule)
            if task not in workloads:
                workloads[task] = prepare(config)
            started = time.monotonic()
            try:
                with patch.multiple(own_size, **{"ALPHA": own_size.ALPHA} | values):
                    result = compare(config, workload=replace(workloads[task], config=config))
                found = finished(result)
            except Diverged as error:
                found = {"broke": str(error)}
            seconds = round(time.monotonic() - started, 1)
            yield {"task": task, "rule": rule, "lr": options.lr, "seconds": seconds} | found


def finished(result: Result) -> dict[str, Any]:
    """What is kept of a run: a number for each seed."""
    (method,) = result.methods.values()
    found: dict[str, Any] = {}
    for point in POINTS:
        found[point] = [means(run.at(point), result.metric) for run in method.runs]
    names = sorted({name for run in method.runs for name in run.candidates})
    found["candidates"] = {
        n: [means(run.candidates.get(n), result.metric) for run in method.runs] for n in names
    }
    found["chosen"] = [[c.candidate[0] + str(c.round) for c in run.choices or ()] for run in method.runs]
    found["share"] = [r.client_share for r in method.runs[0].rounds if r.client_share][-1:]
    found["loss"] = [run.deployed_loss for run in method.runs]
    return found


def means(scores: Any, metric: str) -> float | None:
    return None if scores is None or scores[metric].mean is None else round(100 * scores[metric].mean, 2)


# --- what came of it ---------------------------------------------------------------------------------------


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of some files; one that was cut off as it was written is left out."""
    found = []
    for file in files:
        for line in file.read_text(encoding="utf8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                print(f"{file}: left out {line[:60]!r}")
    return found


def mean_and_deviation(scores: list[float | None] | None) -> tuple[float, float]:
    """Over seeds; −∞ where a run broke."""
    known = [score for score in scores or () if score is not None]
    if not known or len(known) < len(scores or ()):
        return -math.inf, 0.0
    return statistics.mean(known), statistics.stdev(known) if len(known) > 1 else 0.0


class Row(NamedTuple):
    """A rule at one measuring point: its scores by task, and by how much each is below the best of all rules."""

    rule: str
    scores: dict[str, tuple[float, float]]
    behind: dict[str, float]

    @property
    def regret(self) -> float:
        return max(self.behind.values())

    @property
    def mean(self) -> float:
        return statistics.mean(self.behind.values())


def compared(lines: Iterable[dict[str, Any]], point: str) -> list[Row]:
    """The rules at a measuring point, those of most tasks first, and then by regret; a rule at another rate of x is
    another. Of a rule that was run twice on a task, the last run counts."""
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    lines = list(lines)
    rates = {line.get("lr", UNTOLD) for line in lines}
    for line in lines:
        rule = line["rule"] if len(rates) == 1 else f"{line['rule']}, lr {line.get('lr', UNTOLD)}"
        scores.setdefault(rule, {})[line["task"]] = mean_and_deviation(line.get(point))
    best: dict[str, float] = {}
    for of_rule in scores.values():
        for task, (mean, _) in of_rule.items():
            best[task] = max(mean, best.get(task, -math.inf))
    rows = []
    for rule, of_rule in scores.items():
        behind = {t: best[t] - mean if math.isfinite(mean) else math.inf for t, (mean, _) in of_rule.items()}
        rows.append(Row(rule, of_rule, behind))
    return sorted(rows, key=lambda row: (-len(row.scores), row.regret, row.mean))


def table(lines: list[dict[str, Any]], point: str) -> str:
    """A line for each rule: regret, mean distance, and on every task the score, its deviation and the distance."""
    names = list(dict.fromkeys(line["task"] for line in lines))
    shown = [[point, "regret", "mean", *names]]
    for row in compared(lines, point):
        cells = []
        for task in names:
            mean, deviation = row.scores.get(task, (math.nan, 0.0))
            if math.isnan(mean):
                cells.append("")
            elif math.isinf(mean):
                cells.append("broke")
            else:
                behind = f"{-row.behind[task]:.1f}" if row.behind[task] else "best"
                cells.append(f"{mean:.1f}±{deviation:.1f} {behind}")
        shown.append([row.rule, f"{row.regret:.1f}", f"{row.mean:.1f}", *cells])
    widths = [max(map(len, column)) for column in zip(*shown)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))])
        for line in shown
    )


def summary(lines: list[dict[str, Any]]) -> str:
    """Both tables: what is served, and what is deployed."""
    return "\n\n".join(table(lines, point) for point in ("served", "deploy")) if lines else "nothing was run"


def listed() -> str:
    """Every rule with what it sets."""
    lines = []
    for rule, (settings, values) in RULES.items():
        own = {key: value for key, value in settings.items() if key not in ("method", "methods")} | values
        for of_method in settings.get("methods", {}).values():
            own |= of_method
        name = settings.get("method", ["pf2lora"])[0].removeprefix("lower_level_rules:")
        lines.append(f"{rule:<28}{name:<16}{' '.join(f'{k}={v}' for k, v in own.items())}".rstrip())
    return "\n".join([*lines, f"\nfurther tasks, where --tasks names them: {', '.join(MORE)}"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--work", type=Path, default=Path("build/lower_level"))
    parser.add_argument("--out", type=Path, default=Path("build/lower_level.jsonl"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--lr", default="auto", type=lambda text: text if text == "auto" else float(text))
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--rules", nargs="*", choices=RULES, metavar="RULE")
    parser.add_argument("--list", action="store_true", help="the rules")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="the table of finished runs")
    options = parser.parse_args(arguments)
    if options.list:
        print(listed())
        return
    if options.read:
        print(summary(read(options.read)))
        return
    if not options.model:
        parser.error("--model is needed to run anything")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf8") as file:
        for found in runs(options):
            line = json.dumps(found, ensure_ascii=False)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
    print(summary(read([options.out])))


if __name__ == "__main__":
    main()
