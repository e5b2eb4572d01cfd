"""The table of docs/methods.md, from recorded runs of the benchmark of regret: `python benchmarks/methods_table.py`.

Runs nothing. What has no recorded run is named below the table, and no number is made up for it.
"""

from __future__ import annotations

from pathlib import Path

from pages import ROOT, filled, marks

from pf2lora.atomic import write_text
from pf2lora.methods import METHODS
from pf2lora.reproduce.regret import records, show, summary

RUNS = Path("benchmarks/results/regret/minilm_h200.jsonl")
PAGE = ROOT / "docs" / "methods.md"
MADE_BY = "benchmarks/methods_table.py"
BEGIN, _ = marks(MADE_BY)


def table() -> str:
    """The distances as deployed, how they were made, and whose are missing."""
    runs = records.read([ROOT / RUNS])
    deployed = summary.summarize(runs)["deploy"]
    conditions = "; ".join(dict.fromkeys(line.partition(": ")[2] for line in show.made_with(runs)))
    missing = [name for name in METHODS.own if name not in deployed.regret]
    parts = [show.distances(deployed), f"From `{RUNS}`: {conditions}.", *show.at_an_end(runs)]
    if missing:
        parts.append(f"Not run yet: {', '.join(f'`{name}`' for name in missing)}.")
    return "\n\n".join(parts)


def page_with_table(page: str) -> str:
    """The page with the table in its place."""
    return filled(page, MADE_BY, table())


if __name__ == "__main__":
    write_text(PAGE, page_with_table(PAGE.read_text(encoding="utf8")))
