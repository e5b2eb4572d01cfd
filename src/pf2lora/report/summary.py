"""The report's first half page, for whoever decides: what was found, and what each client should deploy."""

from __future__ import annotations

from typing import Any

from pf2lora.report.advice import advice, pools, recommended
from pf2lora.run import numbers
from pf2lora.run.differences import row_margin
from pf2lora.run.estimates import estimate
from pf2lora.run.result import Choice, Result
from pf2lora.run.verdicts import difference, uncertain

SHOWN = 10  # clients that stand in its table
FEW = 4  # clients that a sentence names
LOCAL = "local"
PLAIN = {
    "served": "the model it was given at the end",
    "before_averaging": "its own model of the last round, not averaged",
    "common": "the shared model, without a part of its own",
    "personal_steps": "the shared model, trained a little further on its own data",
    "own": "the shared model with a part of its own",
    "adapted": "the shared model, adapted to its data",
    "local": "a model trained on its own data alone",
}
WORK = {
    "classification": "sort texts into classes",
    "question-answering": "answer questions",
    "generation": "write texts",
}


def summary(result: Result) -> dict[str, Any]:
    """Sentences, and a row for each client; nothing where every method failed."""
    names = recommended(result)
    if not names:
        return {}
    method = names[0]
    sentences = [
        done(result),
        found(result, method),
        together(result),
        useless(result, method),
        sure(result, method),
    ]
    warned = sum(len(run.warnings) for m in result.methods.values() for run in m.runs)
    if warned:
        what = "One warning" if warned == 1 else f"{warned} warnings"
        sentences.append(f"{what} came up on the way: see “Warnings” before relying on the figures.")
    return {
        "sentences": [text for text in sentences if text],
        "advice": advice(result, method, names[1:]) if len(result.methods) > 1 else "",
        "method": result.methods[method].label,
        "rows": rows(result, method)[:SHOWN],
        "more": max(0, len(result.clients) - SHOWN),
        "trivial": result.baselines["trivial"].label if "trivial" in result.baselines else "",
    }


def done(result: Result) -> str:
    """What this is about."""
    clients, methods = len(result.clients), len(result.methods)
    work = WORK.get(result.task, f"do {result.task}")
    who = "One client" if clients == 1 else f"{clients} clients"
    ways = "" if methods == 1 else f" {methods} ways to train it were compared."
    return f"{who} trained a model to {work}.{ways}"


def found(result: Result, method: str) -> str:
    """How good it has become, and what that is to be seen against."""
    info = result.metrics[result.metric]
    score = result.estimate(method, result.point, result.metric)
    if score is None:
        return ""
    unit = " %" if info.percent else ""

    def text(value: float) -> str:
        return f"{numbers.score(value, info, digits=1 if info.percent else 2)}{unit}"

    known = [
        f"{text(mean)} {b.label}"
        for b in result.baselines.values()
        if result.metric in b.scores and (mean := b.scores[result.metric].mean) is not None
    ]
    against = f", against {numbers.listed(known)}" if known else ""
    lower = "" if info.higher_is_better else " (lower is better)"
    return (
        f"{result.methods[method].label} reaches {text(score.mean)} {info.label}{lower}, the mean over clients"
        f"{against}."
    )


def together(result: Result) -> str:
    """Whether it was worth while to train together: the best method that federates against training alone."""
    alone = result.methods.get(LOCAL)
    sign = 1 if result.metrics[result.metric].higher_is_better else -1
    scores = {
        name: sign * e.mean
        for name, method in result.methods.items()
        if name != LOCAL and method.runs and not pools(name)
        if (e := result.estimate(name, result.point, result.metric))
    }
    if alone is None or not alone.runs or not scores:
        return ""
    gap = difference(result, max(scores, key=lambda name: scores[name]), LOCAL)
    if gap is None or gap.is_nought is None:
        return "Whether training together is better than each client alone cannot be told from one run."
    if gap.is_nought:
        return "Training together and each client training alone cannot be told apart on this data."
    where = " in the one training run that there is" if len(alone.runs) == 1 else ""
    if sign * gap.mean > 0:
        return f"Training together is better than each client training alone{where}."
    return f"Training together brought nothing here: each client is better off training alone{where}."


def useless(result: Result, method: str) -> str:
    """Who would do as well without any model."""
    trivial = result.baselines.get("trivial")
    base = trivial.scores.get(result.metric) if trivial else None
    if trivial is None or base is None:
        return ""
    sign = 1 if result.metrics[result.metric].higher_is_better else -1
    scores = result.client_estimates(method, result.point, result.metric)
    names = [
        client.name
        for client, score, level in zip(result.clients, scores, base.per_client)
        if score is not None and level is not None and sign * score.mean <= sign * level
    ]
    if not names:
        return ""
    some = numbers.listed([*names[:FEW], *([f"{len(names) - FEW} more"] if len(names) > FEW else [])])
    return f"For {some} the model is no better than the {trivial.label}: not ready to be used there."


def sure(result: Result, method: str) -> str:
    """How far the figures can be trusted."""
    info, tests = result.metrics[result.metric], sum(client.test for client in result.clients)
    seeds = len(result.methods[method].runs)
    base = f"This rests on {tests:,} test rows and {'one training run' if seeds == 1 else f'{seeds} training runs'}"
    score = uncertain(result, method)
    if score is None or score.margin is None:
        return f"{base}; how far another run would differ is not known."
    margin = numbers.score(score.margin, info, digits=1 if info.percent else 2)
    return f"{base}: the mean is known to about ±\u00a0{margin}{' points' if info.percent else ''}."


def rows(result: Result, method: str) -> list[dict[str, Any]]:
    """What each client should deploy, and how good that is."""
    info, point = result.metrics[result.metric], result.point
    run = result.methods[method].runs[0]
    served = PLAIN["served"]
    if not run.bytes_per_round.total:  # nothing was exchanged
        served = "the one model of all data" if pools(method) else "its own model"
    trivial = result.baselines.get("trivial")
    base = trivial.scores.get(result.metric) if trivial else None
    table = []
    for k, (client, score) in enumerate(
        zip(result.clients, result.client_estimates(method, point, result.metric))
    ):
        errors = [
            r.resampled[point].per_client[k] for r in result.methods[method].runs if point in r.resampled
        ]
        error = estimate(errors)
        table.append(
            {
                "name": client.name,
                "score": numbers.score(score.mean if score else None, info),
                "margin": numbers.score(row_margin(error.mean), info) if score and error else "",
                "trivial": numbers.score(base.per_client[k], info) if base else "",
                "deploy": plain(run.choices[k] if run.choices else None, run.rounds[-1].round, served),
            }
        )
    return table


def plain(choice: Choice | None, last: int, served: str) -> str:
    """What a client takes, without a technical term; `served` is what it has after the last round."""
    if choice is None:
        return served
    word = PLAIN.get(choice.candidate, choice.candidate)
    if choice.candidate == "served":
        word = served if choice.round >= last else served.removesuffix(" at the end")
    return word if choice.round >= last else f"{word}, after round {choice.round} of {last}"
