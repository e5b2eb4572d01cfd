"""The tables of docs/lower-level.md, from the stored lines of `lower_level.py`: `python benchmarks/rules_tables.py`.

Runs nothing. Which rules of `lower_level.py --list` have no line is a table, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lower_level import RULES
from pages import ROOT, filled
from stored_rows import NONE, RESULTS, table

from pf2lora.atomic import write_text
from pf2lora.reproduce.regret.show import number
from pf2lora.run.estimates import estimate

PAGE = ROOT / "docs" / "lower-level.md"
MADE_BY = "benchmarks/rules_tables.py"
FILES = ("first", "second", "third", "fourth", "fifth")
TASKS = {
    "sst2 few": "SST-2, 100 rows",
    "sst2 0.9": "SST-2, h = 0.9",
    "vader": "four domains",
    "flipped": "flipped labels",
    "cola 0.3": "CoLA, h = 0.3",
}
OTHER = {"head layer": "the whole last layer of the head in y", "own rate": "a rate of each client's own"}
NAMES: Mapping[str, dict[str, str]] = {
    "first": {
        "cautious": "D resized where that is better by a standard error",
        "bias, cautious": "the same, with a bias of the head that is resized, too",
        "bias, sketch": "D and bias resized to the least loss",
        "bias, cautious, α 0.3": "with the bias, α = 0.3, by a standard error",
    },
    "second": {
        "auto": "bias left alone, D resized by half a standard error",
        "no caution": "**bias left alone, D resized to the least loss** (the default)",
    },
    "third": OTHER | {"auto": "**the default**"},
    "fourth": OTHER | {"auto": "**the default** (the bias alone)"},
    "fifth": {
        "auto": "sized before every round (the default then)",
        "sized every 20 steps": "sized every 20 steps",
        "sized every 40 steps": "sized every 40 steps",
    },
}
"""What a rule's name meant when a file was made: `auto` is whatever was the default then."""
METHODS = {
    "homlora": "HOMLoRA",
    "hetlora": "HETLoRA",
    "local": "Local",
    "personal head": "HOMLoRA, personal head",
}


def lines(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / f"lower_level_{name}.jsonl").read_text(encoding="utf8")
    return [json.loads(line) for line in text.splitlines()]


def model(line: Mapping[str, Any]) -> str:
    """`mpnet` or `MiniLM`; lines that do not say are of mpnet."""
    return "MiniLM" if "minilm" in str(line.get("model", "mpnet")).casefold() else "mpnet"


def of_file(name: str) -> str:
    """A row per rule, a column per task and model: served, and in brackets deployed."""
    found = {(line["rule"], line["task"], model(line)): line for line in lines(name)}
    columns = [(t, m) for t in TASKS for m in ("mpnet", "MiniLM") if any((t, m) == key[1:] for key in found)]
    labels = METHODS | NAMES[name]
    rows = []
    for rule in sorted(dict.fromkeys(key[0] for key in found), key=list(labels).index):
        cells = [(found.get((rule, *column))) for column in columns]
        rows.append([labels[rule], *(NONE if cell is None else scores(cell) for cell in cells)])
    return table(["served (deployed)", *(f"{TASKS[t]}, {m}" for t, m in columns)], rows)


def scores(line: Mapping[str, Any]) -> str:
    served, deployed = (estimate(line[point]) for point in ("served", "deploy"))
    assert served and deployed
    return f"{number(served)} ({deployed.mean:.1f})"


def never() -> str:
    """The rules that can be run and have no line."""
    ran = {line["rule"] for name in FILES for line in lines(name)} | {
        "sized every round"
    }  # `auto` was that rule
    return ", ".join(f"`{rule}`" for rule in RULES if rule not in ran) + "."


def tables() -> dict[str, str]:
    return {name: of_file(name) for name in FILES} | {"never": never()}


def page_with_tables(page: str) -> str:
    for name, text in tables().items():
        page = filled(page, f"{MADE_BY} ({name})", text)
    return page


if __name__ == "__main__":
    write_text(PAGE, page_with_tables(PAGE.read_text(encoding="utf8")))
