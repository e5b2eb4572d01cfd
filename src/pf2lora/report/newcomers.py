"""Clients that joined when the run had ended: a table of what each could deploy and what it took."""

from __future__ import annotations

from typing import Any

from pf2lora.report.choices import WORDS, deployed, reason
from pf2lora.report.views import EMPTY, Cell
from pf2lora.run import numbers
from pf2lora.run.differences import row_margin
from pf2lora.run.result import NewcomerRecord, Result


def table(result: Result, metric: str) -> dict[str, Any]:
    """A row for each newcomer and method: its score with what it deploys, and with every candidate."""
    found = {name for newcomer in result.newcomers for name in newcomer.scores}
    names = [name for name in (*WORDS, *sorted(found - {*WORDS})) if name in found]
    rows = [
        {
            "name": n.client.name,
            "method": result.methods[n.method].label,
            "client": n.client,
            "deploys": deployed(n),
            "reason": reason(n),
            "deploy": cell(result, n, n.deploy.get(metric), "deploy", metric),
            "cells": [
                cell(result, n, n.scores.get(name, {}).get(metric), name, metric, chosen=name == n.deploys)
                for name in names
            ],
        }
        for n in result.newcomers
    ]
    return {"candidates": [WORDS.get(name, name) for name in names], "rows": rows}


def cell(
    result: Result, n: NewcomerRecord, value: float | None, name: str, metric: str, *, chosen: bool = False
) -> Cell:
    """A score with its interval over the newcomer's test rows, where it is known."""
    if value is None:
        return EMPTY
    info = result.metrics[metric]
    error = n.errors.get(name) if metric == result.metric else None
    margin = "" if error is None else numbers.score(row_margin(error), info)
    return Cell(numbers.score(value, info), margin, "chosen" if chosen else "", "")
