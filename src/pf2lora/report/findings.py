"""What to look at: sentences computed from a result, with nothing claimed that its test rows and seeds do not carry."""

from __future__ import annotations

from pf2lora.run import numbers
from pf2lora.run.estimates import Estimate, estimate, within_spread
from pf2lora.run.result import Point, Result, SeedRun
from pf2lora.run.verdicts import client_differences, difference, uncertain

LOCAL, SINGLE = "local", "homlora"  # the two comparisons everyone asks for
AS: dict[Point, str] = {"served": "served", "deploy": "deployed"}
FEW = 6  # methods that a sentence names
SMALL_SHARE = 0.01  # below this, a client's own adapter hardly changes what the common one does


def findings(result: Result) -> list[str]:
    """The sentences, the most important first."""
    view = _View(result)
    steps = (
        _best,
        _local,
        _own_adapter,
        _choices,
        _averaging,
        _worst_client,
        _client_share,
        _privacy,
        _warnings,
    )
    return [text for step in steps if (text := step(view))]


def conclusions(result: Result) -> list[str]:
    """The two that a command ends with: who is best, and whether federating helps."""
    view = _View(result)
    return [text for step in (_best, _local) if (text := step(view))]


class _View:
    """A result's headline scores, with the words for them."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.metric = result.metric
        self.info = result.metrics[self.metric]
        self.sign = 1 if self.info.higher_is_better else -1
        self.point = result.point
        self.scores = self.estimates(self.point, "mean")
        self.served = self.estimates("served", "mean")
        self.before = self.estimates("before_averaging", "mean")
        self.seeds = max((e.count for e in self.scores.values()), default=1)
        self.order = sorted(self.scores, key=lambda m: -self.sign * self.scores[m].mean)

    def estimates(self, point: Point, what: str) -> dict[str, Estimate]:
        found = {m: self.result.estimate(m, point, self.metric, what) for m in self.result.methods}
        return {m: e for m, e in found.items() if e is not None}

    def label(self, method: str) -> str:
        return self.result.methods[method].label

    def client(self, index: int) -> str:
        return self.result.clients[index].name

    def figure(self, method: str) -> str:
        """The score and its interval."""
        found = uncertain(self.result, method, self.point)
        margin = None if found is None else found.margin
        shown = numbers.score(self.scores[method].mean, self.info)
        return shown if margin is None else f"{shown} ± {numbers.score(margin, self.info)}"

    def number(self, e: Estimate) -> str:
        deviation = "" if e.deviation is None else f" ± {numbers.score(e.deviation, self.info)}"
        return numbers.score(e.mean, self.info) + deviation

    def change(self, value: float) -> str:
        return numbers.score(value, self.info, signed=True)

    def federated(self) -> list[str]:
        """The methods with a server, best first: they alone have a point before averaging."""
        return [m for m in self.order if m in self.before]

    def open(self, method: str, other: str) -> bool | None:
        """Whether two methods' scores cannot be told apart; None where nobody can say."""
        found = difference(self.result, method, other, self.point)
        return None if found is None else found.is_nought

    def gains(self, method: str, baseline: str) -> dict[int, tuple[float, bool | None]]:
        """Per client: how much better `method` is than `baseline`, and whether that may be an accident."""
        found = client_differences(self.result, method, baseline, self.point)
        return {k: (self.sign * d.mean, d.is_nought) for k, d in enumerate(found) if d is not None}


def _best(view: _View) -> str:
    """Who leads, and who cannot be told from the leader."""
    if not view.order:
        return ""
    first, rest = view.order[0], view.order[1:]
    seeds = view.scores[first].count
    over = f"mean over {_plural(len(view.result.clients), 'client')} and {_plural(seeds, 'seed')}"
    name, figure = view.label(first), f"{view.figure(first)} {view.info.label} ({over})"
    if not rest:
        return f"{name} reaches {figure} as {AS[view.point]}."
    close = [m for m in rest if view.open(first, m)]
    unknown = [m for m in rest if view.open(first, m) is None]
    if unknown:
        return (
            f"As {AS[view.point]}, {name} has the highest score: {figure}. Whether that is more than chance needs "
            f"several seeds (--seeds 3)."
        )
    if close:
        names = _few([view.label(m) for m in (first, *close)])
        return (
            f"As {AS[view.point]}, {names} cannot be told apart: {name} has {figure}, and other test rows or seeds "
            f"might turn the order."
        )
    return (
        f"As {AS[view.point]}, {name} scores best: {figure}. Every other method is behind by more than its test rows"
        f"{' and seeds' if seeds > 1 else ''} leave open."
    )


def _local(view: _View) -> str:
    """Does federating beat training alone, and for whom?"""
    methods = [m for m in view.federated() if m != LOCAL]
    if LOCAL not in view.scores or not methods:
        return ""
    best = methods[0]
    gain = view.sign * (view.scores[best].mean - view.scores[LOCAL].mean)
    within = view.open(best, LOCAL)
    verdict = "Federating beats training alone" if gain > 0 else "Federating does not beat training alone"
    if within:
        verdict = "Federating and training alone cannot be told apart"
    elif within is None:
        verdict = f"Federating is {'ahead of' if gain > 0 else 'not ahead of'} training alone"
    alone, change = view.label(LOCAL), view.change(view.sign * gain)
    text = f"{verdict}: {view.label(best)}, the best federated method, is {change} against {alone}"
    return f"{text}{_within(within, view.seeds)}. {_who_gains(view, best, LOCAL)}"


def _who_gains(view: _View, method: str, baseline: str) -> str:
    gains = view.gains(method, baseline)
    if not gains:
        return ""
    better = [k for k, (gain, _) in gains.items() if gain > 0]
    clear = [k for k in better if gains[k][1] is False]
    text = f"{len(better)} of {_plural(len(gains), 'client')} gain"
    if clear and len(clear) < len(better):
        text += f", {len(clear)} of them by more than chance"
    top = max(gains, key=lambda k: gains[k][0])
    low = min(gains, key=lambda k: gains[k][0])
    if better:
        text += f"; most {view.client(top)} ({view.change(view.sign * gains[top][0])})"
    if gains[low][0] < 0:
        text += f"; {view.client(low)} loses most ({view.change(view.sign * gains[low][0])})"
    return text + "."


def _own_adapter(view: _View) -> str:
    """What the client's own adapter adds to one common adapter."""
    own, common = "pf2lora", SINGLE
    if own not in view.scores or common not in view.scores:
        return ""
    within = view.open(own, common)
    change = view.change(view.scores[own].mean - view.scores[common].mean)
    return (
        f"The client’s own adapter: {view.label(own)} is {change} against {view.label(common)}, which has "
        f"the common adapter only{_within(within, view.seeds)}. {_who_gains(view, own, common)}"
    )


def _choices(view: _View) -> str:
    """How many clients took something else than what they are served, and what that brought."""
    both = [m for m in view.scores if m in view.served]
    if view.point != "deploy" or not both:
        return ""
    gains = {m: view.sign * (view.scores[m].mean - view.served[m].mean) for m in both}
    moved = {m: 1 - _served_share(view.result.methods[m].runs) for m in both}
    order = sorted(both, key=lambda m: -moved[m]) if len(both) > FEW else both
    parts = [f"{moved[m]:.0%} ({view.label(m)})" for m in order if moved[m]]
    if not parts:
        return (
            "Every client deploys what it is served after the last round: no other model was clearly better on its "
            "validation rows."
        )
    most = max(gains, key=lambda m: gains[m])
    if len(both) == 1:
        return (
            f"{moved[most]:.0%} of the clients deploy something else than what they are served: "
            f"{view.change(view.sign * gains[most])} against the served score."
        )
    text = f"Clients that deploy something else than what they are served: {_few(parts)}."
    if gains[most] <= 0:
        return f"{text} On the test rows that brings no method anything."
    return f"{text} It brings {view.label(most)} most: {view.change(view.sign * gains[most])} against its served score."


def _served_share(runs: list[SeedRun]) -> float:
    """The share of clients, over seeds, that deploy what they are served after the last round."""
    found = [
        c.candidate == "served" and c.round == run.rounds[-1].round for run in runs for c in run.choices or []
    ]
    return sum(found) / len(found) if found else 1.0


def _averaging(view: _View) -> str:
    """How far the score before averaging is from what is served."""
    costs = {m: view.sign * (view.before[m].mean - view.served[m].mean) for m in view.federated()}
    if not costs:
        return ""
    most = max(costs, key=lambda m: costs[m])
    least = min(costs, key=lambda m: costs[m])
    if costs[most] <= 0:
        return "Averaging costs no method anything: served scores are at least those before averaging."
    text = (
        f"Before averaging, clients look better than what they are served: averaging costs {view.label(most)} "
        f"{numbers.score(costs[most], view.info)}"
    )
    if least != most and costs[least] >= 0:
        text += f" and {view.label(least)} {numbers.score(costs[least], view.info)}"
    elif least != most:
        text += f", while {view.label(least)} gains {numbers.score(-costs[least], view.info)} by it"
    if view.point == "served":
        return f"{text}. Compare methods by the served score unless clients keep the model they had before."
    return f"{text}. As deployed, each client has chosen between the two."


def _worst_client(view: _View) -> str:
    """The client who is worst off with the best method, and the method that is kindest to its worst."""
    worst = view.estimates(view.point, "worst")
    if not view.order or not worst:
        return ""
    best = view.order[0]
    scores = view.result.client_estimates(best, view.point, view.metric)
    known = {k: e for k, e in enumerate(scores) if e is not None}
    if len(known) < 2:
        return ""
    low = min(known, key=lambda k: view.sign * known[k].mean)
    kindest = max(worst, key=lambda m: view.sign * worst[m].mean)
    text = f"Worst off under {view.label(best)} is {view.client(low)} with {view.number(known[low])}."
    if kindest == best or best not in worst:
        return text
    within = within_spread(worst[kindest], worst[best])
    return (
        f"{text} {view.label(kindest)} has the best worst client ({view.number(worst[kindest])} against "
        f"{view.number(worst[best])}{_within(within, view.seeds)})."
    )


def _client_share(view: _View) -> str:
    """How large the clients' own adapters have become."""
    shares = {m: e for m in view.result.methods if (e := last_share(view.result, m))}
    if not shares:
        return ""
    parts = [f"{e.mean:.1%} ({view.label(m)})" for m, e in shares.items()]
    text = f"At the end a client’s own adapter has {numbers.listed(parts)} of the common adapter’s size"
    small = [view.label(m) for m, e in shares.items() if e.mean < SMALL_SHARE]
    if small:
        text += f"; below {SMALL_SHARE:.0%}, as for {numbers.listed(small)}, a client’s model is nearly the common one"
    return text + "."


def last_share(result: Result, method: str) -> Estimate | None:
    """‖s̃·DC‖ / ‖s·BA‖ in the last round that has it: mean over clients, then over seeds."""
    lasts = []
    for run in result.methods[method].runs:
        rows = [entry.client_share for entry in run.rounds if entry.client_share is not None]
        e = estimate(rows[-1]) if rows else None
        lasts.append(e.mean if e else None)
    return estimate(lasts)


def _privacy(view: _View) -> str:
    """What the common adapter costs its clients, and what that does not cover."""
    runs = {
        m: [run.privacy for run in method.runs if run.privacy] for m, method in view.result.methods.items()
    }
    parts = [
        f"{view.label(m)}: {text}"
        for m, own in runs.items()
        for text in dict.fromkeys(p.sentence() for p in own)
    ]
    if not parts:
        return ""
    return (
        f"Differential privacy of the common adapter: {'; '.join(parts)}. It covers the common adapters of all rounds, "
        "not the scores on this page nor the clients’ own adapters; what several runs on the same rows cost adds up."
    )


def _warnings(view: _View) -> str:
    methods = view.result.methods
    counts = {m: sum(len(run.warnings) for run in methods[m].runs) for m in methods}
    total = sum(counts.values())
    if not total:
        return ""
    names = numbers.listed([view.label(m) for m in counts if counts[m]])
    them = "it" if total == 1 else "them"
    return f"{_plural(total, 'warning')} came up in training ({names}): read {them} below before trusting the scores."


def _few(parts: list[str]) -> str:
    """Some of a long list, the first ones, and how many more there are."""
    more = len(parts) - FEW
    return numbers.listed(parts if more <= 1 else [*parts[:FEW], f"{more} others"])


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _within(within: bool | None, seeds: int) -> str:
    """The words after a difference: what test rows and seeds say of it."""
    told = ", more than chance" if seeds > 1 else " in one seed, more than other test rows would change"
    return {True: ", which may be chance", False: told, None: " in one seed"}[within]
