"""Whole runs with `client_lr = "auto"`: where a fixed rate breaks they do not, and where there is nothing personal to
learn they lose nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import LEARNING, World, make_world, sentences, write_jsonl
from tiny import EveryRound, Problem, RegressionSource
from torch import Tensor

import pf2lora
from pf2lora.adapters.first_state import factor_entries
from pf2lora.core.choice import Judge
from pf2lora.core.layout import Layout
from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.batches import Batch
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.methods.own_size import OwnSize
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.methods.pf2lora_joint import PF2LoRAJoint

CLIENTS, IN, OUT = 3, 8, 6
KINDS: list[tuple[type[OwnSize], dict[str, Any]]] = [
    *((PF2LoRA, {"hypergradient_mode": mode}) for mode in ("exact", "difference", "none")),
    (PF2LoRAJoint, {}),
]
IDS = ["exact", "difference", "none", "joint"]

# ---- a linear map: nothing bounds what a step too long does to it ----


class Linear:
    """Each client's `u ↦ (W + W_k) u`, learned as BA + D_kC_k in float32 from rows and judged on others."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        self.common = Layout(tuple(factor_entries({"w": (OUT, IN)}, "A", "B", 2)), 2 * (IN + OUT))
        self.own = Layout(tuple(factor_entries({"w": (OUT, IN)}, "C", "D", 2)), 0)
        maps = normal(1, OUT, 1) @ normal(1, 1, IN) + normal(CLIENTS, OUT, 1) @ normal(CLIENTS, 1, IN)
        inputs, self.judged = 3 * normal(CLIENTS, 40, IN), 3 * normal(CLIENTS, 30, IN)
        self.wanted = self.judged @ maps.mT
        source = RegressionSource(
            list(inputs), list(inputs @ maps.mT), [f"client-{k}" for k in range(CLIENTS)], size=8
        )
        A, C = (normal(n, 2 * IN) / IN**0.5 for n in (1, CLIENTS))
        x, y = (torch.cat([t, torch.zeros(len(t), 2 * OUT)], dim=1) for t in (A.expand(CLIENTS, -1), C))
        self.problem = Problem(self.loss, source, self.common, x, y)

    def outputs(self, x: Tensor, y: Tensor, inputs: Tensor) -> Tensor:
        p, q = self.common.unpack(x), self.own.unpack(y)
        return inputs @ (p["w.B"] @ p["w.A"] + q["w.D"] @ q["w.C"]).mT

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        inputs, targets = (batch.tensors[n].unflatten(0, (batch.clients, -1)) for n in ("inputs", "targets"))
        return (self.outputs(x, y, inputs) - targets).square().mean((1, 2))

    def judges(self, clients: Sequence[int]) -> Judge:
        at = torch.tensor(clients)

        def judge(x: Tensor, y: Tensor) -> Tensor:
            losses = (self.outputs(x, y, self.judged[at]) - self.wanted[at]).square().mean(2).double()
            return losses.masked_fill(~torch.isfinite(losses), torch.inf)

        return judge


@dataclass(frozen=True)
class SomeRounds(EveryRound):
    """Only the first `asked` clients have few rows, and who is asked is written down."""

    asked: int = 0
    seen: list[list[int]] = field(default_factory=list)

    def __call__(self, learners: Sequence[int]) -> Judge:
        self.seen.append(list(learners))
        return super().__call__(learners)

    def batches(self, learner: int) -> Fraction:
        return super().batches(learner) if learner < self.asked else Fraction(1000)


def test_who_asks_before_a_round_and_who_does_not_share_a_pass() -> None:
    """The first client is sized before the second round and the others are not: each has what it would have if all
    were, or nobody."""
    world = Linear()
    p = world.problem
    method = PF2LoRA(
        p.layout, lr=0.02, client_lr="auto", personal_layout=world.own, hypergradient_mode="none"
    )
    schedule = Schedule(rounds=2, steps=10)
    found = []
    for asked in (0, 1, CLIENTS):
        judges = SomeRounds(world.judges, asked)
        *_, last = train(method, p.F, method.init(p.x, p.y), p.source, schedule, judges=judges)
        found.append(last.kept().before)
        assert judges.seen == ([list(range(asked))] if asked else [])
    nobody, one, everybody = found
    assert torch.equal(one.y[0], everybody.y[0]) and torch.equal(one.x[0], everybody.x[0])
    assert torch.equal(one.y[1:], nobody.y[1:]) and torch.equal(one.x[1:], nobody.x[1:])
    assert (everybody.y != nobody.y).any(1).all()


def test_sizes_are_tried_by_each_clients_own_steps() -> None:
    """One of three clients takes part in a round of ten steps: it is sized before its fifth, its ninth …, also in a run
    that was broken off and goes on."""
    world = Linear()
    p = world.problem
    method = PF2LoRA(
        p.layout, lr=0.02, client_lr="auto", personal_layout=world.own, hypergradient_mode="none"
    )
    schedule, judges = Schedule(rounds=24, steps=10, participation=0.3), SomeRounds(world.judges)
    took_part, sized, kept = [0] * CLIENTS, [], []
    for done in train(method, p.F, method.init(p.x, p.y), p.source, schedule, judges=judges):
        (k,) = done.participants
        assert judges.seen == ([[k]] if took_part[k] in (4, 8) else []), done.number
        sized.extend(judges.seen)
        judges.seen.clear()
        took_part[k] += 1
        kept.append(done.kept())
    assert len(sized) > CLIENTS and max(took_part) < 13
    half = kept[11]
    again = train(
        *(method, p.F, half.served, p.source, schedule), judges=SomeRounds(world.judges), after=half.after
    )
    *_, last = again
    assert torch.equal(last.served.y, kept[-1].served.y)


def run(kind: type[OwnSize], client_lr: Any, **options: Any) -> list[Round]:
    world = Linear()
    p = world.problem
    method = kind(p.layout, lr=0.02, client_lr=client_lr, personal_layout=world.own, **options)
    state, schedule = method.init(p.x, p.y), Schedule(rounds=15, steps=10)
    found = train(method, p.F, state, p.source, schedule, judges=EveryRound(world.judges))
    return [done.kept() for done in found]


@pytest.mark.parametrize("client_lr", [1.0, 10.0])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_a_rate_that_breaks_a_run_and_auto_that_does_not(
    kind: type[OwnSize], options: dict[str, Any], client_lr: float
) -> None:
    with pytest.raises(Diverged):
        run(kind, client_lr, **options)
    rounds = run(kind, "auto", **options)
    first, last = rounds[0].stats.loss[0], rounds[-1].stats.loss.mean(0)
    assert (last < 0.5 * first).all()
    assert (
        torch.isfinite(rounds[-1].served.y).all() and (rounds[-1].served.y != rounds[0].served.y).any(1).all()
    )


# ---- a transformer ----


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def served(world: World, method: str, client_lr: Any, **changes: Any) -> list[float]:
    """Every client's loss on its test rows."""
    settings = world.settings(
        method=[method],
        client_lr=client_lr,
        validation_ratio=0.1,
        personal_steps=0,
        hypergradient_mode="none",
    )
    found = pf2lora.federate(**settings | changes).served("loss", method)
    return [found[path.stem] for path in map(Path, (settings | changes)["clients"])]  # type: ignore[misc]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_auto_learns_where_a_rate_is_too_large(precision: str, world: World) -> None:
    """At 30 every client's adapter is so large that the model says nothing; at 1e30 there is no loss."""
    learning = {key: LEARNING[key] for key in ("rounds", "steps", "lr")} | {"precision": precision}
    auto, large = (served(world, "pf2lora", rate, **learning) for rate in ("auto", 30.0))
    assert max(auto[:2]) < 0.45 < 0.6 < min(large)  # the third, to whom good words are bad, takes longer
    with pytest.raises(Diverged):
        served(world, "pf2lora", 1e30, **learning)


@pytest.mark.usefixtures("one_thread")
def test_clients_that_are_the_same_lose_nothing_against_homlora(world: World, tmp_path: Path) -> None:
    """There is nothing personal to learn: auto ends where HOMLoRA does, no worse and (or something else is compared) no
    better, and a rate that is too large does not."""
    files = [str(write_jsonl(tmp_path / f"{name}.jsonl", sentences(240, 0))) for name in ("a", "b", "c")]
    changes: dict[str, Any] = {"clients": files, "rounds": 10, "steps": 5, "lr": 0.003}
    homlora, auto, large = (
        torch.tensor(served(world, *run, **changes)).mean()
        for run in (("homlora", 0.03), ("pf2lora", "auto"), ("pf2lora", 3.0))
    )
    assert abs(auto - homlora) < 0.02 < large - homlora
