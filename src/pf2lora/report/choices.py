"""What clients deploy, in words and in a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pf2lora.report.views import EMPTY, Cell, Series, ranked
from pf2lora.run import numbers
from pf2lora.run.estimates import estimate
from pf2lora.run.result import Choice, NewcomerRecord, Result, SeedRun

WORDS = {
    "served": "served",
    "before_averaging": "before averaging",
    "common": "the common adapter alone",
    "personal_steps": "after personal steps",
    "own": "own adapter on the common one",
    "adapted": "the common adapter, adapted",
    "local": "training alone",
}
"""A client's candidates; the last three are a newcomer's."""
FEW = 8  # clients that are named one by one


def kind(choice: Choice, last: int) -> str:
    """A choice in words that several clients can share: `served`, `served in an earlier round`."""
    word = WORDS.get(choice.candidate, choice.candidate)
    return word if choice.round == last else f"{word} in an earlier round"


def exactly(choice: Choice, last: int) -> str:
    """A choice in words, with the round where it is not the last."""
    word = WORDS.get(choice.candidate, choice.candidate)
    return word if choice.round == last else f"{word} in round {choice.round}"


def counts(runs: list[SeedRun]) -> Counter[str]:
    """How many clients, of all seeds, chose what: the most frequent first."""
    return Counter(kind(c, run.rounds[-1].round) for run in runs for c in run.choices or [])


def sentence(result: Result, method: str) -> str:
    """`3 × served, 1 × after personal steps`; client by client where one method has one seed; empty without choices."""
    runs = result.methods[method].runs
    names = [client.name for client in result.clients]
    if len(result.methods) == len(runs) == 1 and runs[0].choices and len(names) <= FEW:
        last = runs[0].rounds[-1].round
        return "; ".join(f"{name}: {exactly(c, last)}" for name, c in zip(names, runs[0].choices))
    return ", ".join(f"{count} × {what}" for what, count in counts(runs).most_common())


def deployed(newcomer: NewcomerRecord) -> str:
    """What a newcomer deploys, in words."""
    word, choice = WORDS.get(newcomer.deploys, newcomer.deploys), newcomer.choice
    earlier = choice is not None and newcomer.deploys == "own" and choice.round < newcomer.rounds
    return f"{word} after round {choice.round}" if choice and earlier else word


def reason(newcomer: NewcomerRecord) -> str:
    """Why it deploys that."""
    choice, rows = newcomer.choice, newcomer.client.validation
    if choice is None:
        return "it has no validation rows to choose by"
    if newcomer.deploys == newcomer.served:
        if newcomer.deploys == "own" and choice.round < newcomer.rounds:
            return f"on its {rows} validation rows that was clearly better than after the last round"
        return f"nothing else was clearly better on its {rows} validation rows"
    losses = choice.validation_loss, choice.last_round.get(newcomer.served)
    shown = ["–" if loss is None else f"{loss:.3f}" for loss in losses]
    other = WORDS.get(newcomer.served, newcomer.served)
    return f"its loss on {rows} validation rows, {shown[0]}, is clearly below that of {other}, {shown[1]}"


def table(series: list[Series], metric: str) -> dict[str, Any]:
    """A row per method: what all clients would score with the same candidate, and how many chose it."""
    shown = [s for s in series if any(run.choices for run in s.seeds)]
    found = {name for s in shown for run in s.seeds for name in run.candidates}
    names = [*(name for name in WORDS if name in found), *sorted(found - {*WORDS})]
    rows = []
    for s in shown:
        chosen = Counter(c.candidate for run in s.seeds for c in run.choices or [])
        cells = [score_cell(s, name, metric) for name in names]
        deployed = [s.result.estimate(s.method, "deploy", metric)]
        rows.append(
            {
                "series": s,
                "deploy": ranked(deployed, s.result.metrics[metric])[0],
                "cells": list(zip(cells, [chosen[name] for name in names])),
                "of": sum(chosen.values()),
            }
        )
    return {"candidates": [WORDS.get(name, name) for name in names], "rows": rows}


def score_cell(series: Series, candidate: str, metric: str) -> Cell:
    """The mean over clients with one candidate for all of them."""
    tables = [run.candidates.get(candidate, {}).get(metric) for run in series.seeds]
    found = estimate(t.mean if t else None for t in tables)
    if found is None:
        return EMPTY
    info = series.result.metrics[metric]
    deviation = "" if found.deviation is None else numbers.score(found.deviation, info)
    return Cell(numbers.score(found.mean, info), deviation, "", "")
