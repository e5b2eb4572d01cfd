"""The benchmark of lower-level rules as tests see it, and a small problem for its rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tiny import Problem, regression_problem
from torch import Tensor

from pf2lora.adapters.first_state import factor_entries
from pf2lora.core.layout import Layout
from pf2lora.core.method import State
from pf2lora.methods.pf2lora import PF2LoRA

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)  # as `python benchmarks/lower_level.py` finds them
import lower_level  # noqa: E402, F401
import lower_level_rules as rules  # noqa: E402

sys.path.remove(BENCHMARKS)

ALL, STEEP = [0, 1, 2], 10.0  # a rate of x at which no step of y is cut
KINDS: list[type[rules.Rule]] = [
    rules.Rule,
    rules.OwnRate,
    rules.CumulativeNorm,
    rules.CappedPolyak,
    rules.AdamBelow,
    rules.ProdigyBelow,
    rules.LowerAfter,
    rules.Decay,
]
MODES = ("exact", "difference", "none")
OWN = Layout(tuple(factor_entries({f"w{i}": (5, 6) for i in range(2)}, "C", "D", 2)), 0)


def problem() -> Problem:
    p = regression_problem()
    assert p.y.shape[1] == OWN.size
    return p


def made(kind: type[rules.Rule], p: Problem, **options: Any) -> rules.Rule:
    defaults: dict[str, Any] = {"personal_layout": OWN, "hypergradient_mode": "none", "lr": 0.01}
    return kind(p.layout, **defaults | options)


def batches(p: Problem, method: PF2LoRA, number: int = 0) -> list[Any]:
    return [p.source.draw(ALL, [method.draws * number + i] * 3) for i in range(method.draws)]


def lower(p: Problem, s: State, batch: Any) -> tuple[Tensor, Tensor]:
    """F(x, y; π) and ∇_y F, as columns and rows."""
    y_ = s.y.clone().requires_grad_()
    loss = p.F(s.x, y_, batch)
    return loss.detach().unsqueeze(1), torch.autograd.grad(loss.sum(), y_)[0]


def walk(method: rules.Rule, p: Problem, steps: int) -> list[tuple[State, Tensor, Tensor]]:
    """The states, each with F and ∇_y F at π; the last has none after it."""
    s, found = method.init(p.x, p.y), []
    for i in range(steps):
        drawn = batches(p, method, i)
        found.append((s, *lower(p, s, drawn[0])))
        s = method.step(p.F, s, *drawn)[0]
    return [*found, (s, torch.empty(0), torch.empty(0))]


def same(found: Any, expected: Any, atol: float = 1e-13) -> None:
    """Every tensor of nested tuples."""
    if isinstance(found, Tensor):
        close(found, expected, atol)
        return
    for a, b in zip(found, expected, strict=True):
        same(a, b, atol)


def close(found: Tensor, expected: Tensor, atol: float = 1e-13) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def norm(rows: Tensor) -> Tensor:
    return rows.norm(dim=1, keepdim=True)
