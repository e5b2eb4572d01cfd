"""Rates that change with the steps of a run, and rates of each client's own: by their formula, in every method."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import SETTINGS, Problem, build, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.method import Method, State, StepStats, take
from pf2lora.core.rates import RateSchedule
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.engines.rates import Rates
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 0.3, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("linear", 0.2, [1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", 0.2, [1 / 2, 1, *((1 + math.cos(math.pi * p / 8)) / 2 for p in range(8))]),
    ],
)
def test_factors_are_those_of_the_formula(kind: str, warmup: float, expected: list[float]) -> None:
    schedule = RateSchedule(kind, warmup)
    assert [schedule.factor(t, 10) for t in range(10)] == pytest.approx(expected, abs=1e-15)
    assert schedule.is_constant == (expected == [1] * 10)
    assert min(schedule.factor(t, 10) for t in range(10)) > 0


def test_a_warm_up_of_the_whole_of_a_short_run_and_of_a_share_with_a_last_bit() -> None:
    assert RateSchedule("linear", 0.5).factor(0, 1) == 1
    assert RateSchedule("constant", 0.1).factor(2, 30) == 1  # 0.1 · 30 is 3, and a bit more in binary


@pytest.mark.parametrize(
    ("values", "message"),
    [(("steps", 0.0), "schedule 'steps'"), (("linear", 1.0), r"in \[0, 1\)"), (("linear", -0.1), "warmup")],
)
def test_what_is_no_schedule_is_refused(values: tuple[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RateSchedule(*values)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_scheduled_run_is_torchs_adamw_with_torchs_scheduler(kind: str) -> None:
    """One client and no warm-up: HOMLoRA is AdamW under LinearLR or CosineAnnealingLR."""
    p = regression_problem(sizes=(9,))
    method, total = HomLoRA(p.layout, lr=0.03), 6
    *_, last = train(
        *(method, p.F, method.init(p.x, p.y), p.source, Schedule(3, 2, rates=RateSchedule(kind)))
    )
    x = p.x.clone().requires_grad_()
    adam = torch.optim.AdamW([x], lr=0.03, weight_decay=0.01)
    schedulers: dict[str, Any] = {
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, total),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(adam, total),
    }
    scheduler = schedulers[kind]()
    for t in range(total):
        adam.zero_grad()
        p.F(x, p.y, p.source.draw([0], [t])).sum().backward()
        adam.step()
        scheduler.step()
    torch.testing.assert_close(last.served.x, x.detach(), rtol=0, atol=1e-13)


class Seen(HomLoRA):
    """Notes the rates of its steps."""

    rates: list[Any] = []  # noqa: RUF012

    def step(self, F: Any, s: State, *batches: Any) -> tuple[State, StepStats]:
        Seen.rates.append(self.lr)
        return super().step(F, s, *batches)


def test_the_clock_is_the_runs_and_constant_rates_stay_numbers() -> None:
    """Who sat a round out has the next one's rates; and a plain run's step sees the number itself."""
    p = regression_problem()
    method = Seen(p.layout, lr=0.5)
    for participation, per_pass in ((1.0, None), (0.5, 1)):
        Seen.rates = []
        plan = Schedule(3, 2, participation, clients_per_pass=per_pass, rates=RateSchedule("linear"))
        rounds = list(train(method, p.F, method.init(p.x, p.y), p.source, plan))
        by_step = [0.5 * (1 - t / 6) for t in range(6)]
        if per_pass is None:
            assert [rate.flatten().tolist() for rate in Seen.rates] == [[rate] * 3 for rate in by_step]
        else:
            expected = [by_step[2 * r.number - 2 + i] for r in rounds for _ in r.participants for i in (0, 1)]
            assert [rate.item() for rate in Seen.rates] == expected
    Seen.rates = []
    list(train(method, p.F, method.init(p.x, p.y), p.source, Schedule(1, 2)))
    assert Seen.rates == [0.5, 0.5]


def test_which_rates_a_schedule_changes() -> None:
    """Those of learning. Per-FedAvg's α is part of what it minimizes; a rate that is 0 or a word stays what it is."""
    p = regression_problem()
    rates = Rates(RateSchedule("linear"), 2, 2, 3)

    def found(method: Method) -> dict[str, float]:
        return {name: rate[1].item() for name, rate in rates.of_round(method, [1, 2], 2, p.x)[0].items()}

    assert found(PF2LoRA(p.layout, lr=0.2, client_lr=0.4)) == {"lr": 0.1, "client_lr": 0.2}
    assert found(PF2LoRA(p.layout, lr=0.2, client_lr="auto")) == {"lr": 0.1}
    assert found(PF2LoRA(p.layout, lr=0.2, client_lr=0.0)) == {"lr": 0.1}
    assert found(PerFedAvg(p.layout, lr=0.2, adaptation_lr=0.4)) == {"lr": 0.1}
    assert list(replace(rates, schedule=RateSchedule()).of_round(HomLoRA(p.layout), [0], 1, p.x)) == []


# --- a rate for each client ----------------------------------------------------------------------------------

EACH = [(setting, name) for setting, (kind, _) in SETTINGS.items() for name in sorted(kind.per_client)]


@pytest.mark.parametrize(("setting", "name"), EACH)
def test_clients_of_one_pass_may_have_their_own_rates(setting: str, name: str) -> None:
    """Two steps of three clients at once, each with its own number, are those of each alone with that number."""
    p = regression_problem()
    values = [0.02, 0.05, 0.3]
    method = build(setting, p)
    stacked = {name: p.x.new_tensor(values).unsqueeze(1)}
    s = first = method.init(p.x, p.y)
    for step in range(2):
        batches = [p.source.draw([0, 1, 2], [step * method.draws + d] * 3) for d in range(method.draws)]
        s, _ = method.with_rates(stacked).step(p.F, s, *batches)
    for k, value in enumerate(values):
        alone, own = build(setting, p, **{name: value}), take(first, [k])
        for step in range(2):
            batches = [p.source.draw([k], [step * method.draws + d]) for d in range(method.draws)]
            own, _ = alone.step(p.F, own, *batches)
        torch.testing.assert_close(take(s, [k]).x, own.x, rtol=0, atol=1e-12)
        torch.testing.assert_close(take(s, [k]).y, own.y, rtol=0, atol=1e-12)
    assert method.with_rates({}) is method


@pytest.mark.parametrize("mode", ["exact", "difference", "none"])
def test_auto_bounds_its_steps_by_each_clients_own_rate(mode: str) -> None:
    p = tiny_problem("roberta")
    values = [0.001, 0.01, 0.1]

    def auto(**changes: Any) -> PF2LoRA:
        return PF2LoRA(p.layout, hypergradient_mode=mode, personal_layout=p.personal_layout, **changes)

    together = auto().init(p.x, p.y)
    batches = [p.source.draw([0, 1, 2], [d] * 3) for d in range(2)]
    stepped, _ = auto().with_rates({"lr": p.x.new_tensor(values).unsqueeze(1)}).step(p.F, together, *batches)
    for k, value in enumerate(values):
        batches = [p.source.draw([k], [d]) for d in range(2)]
        own, _ = auto(lr=value).step(p.F, take(together, [k]), *batches)
        torch.testing.assert_close(stepped.x[k : k + 1], own.x, rtol=0, atol=1e-9)
        torch.testing.assert_close(stepped.y[k : k + 1], own.y, rtol=0, atol=1e-9)


class Twice:
    """A problem's clients once more, as a second federation beside the first."""

    def __init__(self, p: Problem) -> None:
        self.source = p.source
        self.names, self.sizes = p.source.names * 2, p.source.sizes * 2

    def draw(self, clients: Any, numbers: Any) -> Any:
        return self.source.draw([i % 3 for i in clients], numbers)


@pytest.mark.parametrize(
    "setting", ["pf2lora-difference", "homlora", "fedavgm", "scaffold", "hetlora", "local"]
)
@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_federations_side_by_side_have_their_own_rates(setting: str, kind: str) -> None:
    """A run of two federations that differ by lr is the two runs, with a schedule and without."""
    p = regression_problem()
    rates = [{"lr": 0.01}, {"lr": 0.05}]

    def last(method: Method, source: Any, *parts: Tensor, **schedule: Any) -> Round:
        plan = Schedule(3, 2, 0.67, rates=RateSchedule(kind, 0.2), **schedule)
        *_, done = train(method, p.F, method.init(*parts), source, plan)
        return done.kept()

    options = {"ranks": (1, 3, 4) * 2} if setting == "hetlora" else {}
    whole = last(
        *(build(setting, p, **options), Twice(p), p.x.repeat(2, 1), p.y.repeat(2, 1)),
        seeds=(0, 0),
        own_rates=tuple(rates),
    )
    for f, own in enumerate(rates):
        alone = last(build(setting, p, **own), p.source, p.x, p.y)
        torch.testing.assert_close(whole.served.x[3 * f : 3 * f + 3], alone.served.x, rtol=0, atol=1e-12)
        torch.testing.assert_close(whole.served.y[3 * f : 3 * f + 3], alone.served.y, rtol=0, atol=1e-12)
    assert not torch.equal(whole.served.x[0], whole.served.x[3])
