"""What a run costs, computed a second way: operations, parameters, bytes, time, memory."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from little_world import FILLING, World, make_world, write_jsonl
from tiny import tiny_two_level

import pf2lora
from pf2lora.adapters.first_state import factor_entries
from pf2lora.core.layout import Layout
from pf2lora.core.method import Method, Surroundings, moved, take
from pf2lora.methods import METHODS
from pf2lora.methods.bilevel import Bilevel
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.run import costs, trial
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.result import SeedRun
from pf2lora.run.set_up import Trial, set_up


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """With texts of many lengths."""
    world = make_world(tmp_path_factory.mktemp("world"))
    random = np.random.default_rng(0)
    for path in world.clients:
        rows = [
            {
                "text": " ".join(random.choice(FILLING, random.integers(2, 14))),
                "label": "pos" if i % 2 else "neg",
            }
            for i in range(30)
        ]
        write_jsonl(path, rows)
    return world


def ready(world: World, method: str, **changes: Any) -> Trial:
    config = from_settings(world.settings(method=[method], group_by_length=False, **changes))
    return set_up(prepare(config), method, config.training.seed)


def finished(ready: Trial) -> SeedRun:
    (outcome,) = trial.run(ready, lambda seed, record: None)
    return outcome.record


def step_by_step(ready: Trial, variant: Method | None = None) -> float:
    """The run's operations, every client's every step counted by itself on its own batch, as long as the longest row of
    all clients' batches makes it."""
    method, source, schedule = ready.method, ready.source, ready.schedule
    one = moved(take(ready.state, [0]), "cpu")
    everybody = range(len(source.names))
    total = 0.0
    for step in range(schedule.rounds * schedule.steps):
        numbers = [step * method.draws + d for d in range(method.draws)]
        lengths = [source.draw(everybody, [n] * len(everybody)).length for n in numbers]
        batches = costs.shortest(source, lengths)
        total += len(everybody) * costs.flops_of_step(variant or method, ready.F, one, batches)
    return total / schedule.rounds


@pytest.mark.parametrize("method", ["homlora", "pf2lora", "per-fedavg", "hetlora", "centralized"])
def test_operations_are_those_of_every_step_counted_by_itself(method: str, world: World) -> None:
    """Three lengths of each batch are counted; the others follow, as operations are quadratic in the length."""
    one = ready(world, method, rounds=2, steps=5, batch_size=2)
    lengths = {
        one.source.draw(range(len(one.source.names)), [n] * len(one.source.names)).length for n in range(10)
    }
    assert len(lengths) > 1 or method == "centralized"
    expected = step_by_step(one)
    assert finished(one).flops_per_round == pytest.approx(expected, rel=1e-6)


def test_a_methods_operations_do_not_depend_on_one_arbitrary_batch(world: World) -> None:
    """PF2LoRA's three gradients of a step cost between 2.5 and 3.5 of HOMLoRA's one, whatever the seed."""
    for seed in range(4):
        flops = [
            finished(ready(world, method, rounds=2, steps=6, batch_size=2, seed=seed)).flops_per_round or 0
            for method in ("pf2lora", "homlora")
        ]
        assert 2.5 < flops[0] / flops[1] < 3.5


def test_auto_is_counted_by_what_it_did(world: World) -> None:
    """Its first round measures the second-order term, the others leave it out."""
    settings = {"rounds": 3, "client_lr": 1e-4, "precision": "bfloat16"}
    counted = {
        mode: finished(ready(world, "pf2lora", hypergradient_mode=mode, **settings)).flops_per_round or 0
        for mode in ("auto", "difference", "none")
    }
    expected = (counted["difference"] + 2 * counted["none"]) / 3
    assert counted["auto"] == pytest.approx(expected, rel=0.05)
    assert counted["none"] < counted["auto"] < counted["difference"]


def test_dense_products_are_counted_by_hand() -> None:
    """A forward and a backward pass of one layer's projections: two operations for each number multiplied."""
    model = tiny_two_level("bert")
    method = METHODS["homlora"](model.common_layout)
    x, y = model.initial(0, ["a"], torch.float64)

    def F(x: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
        A = model.common_layout.unpack(x)[model.common_layout.entries[0].name]  # (1, r, n)
        return (batch @ A.mT).sum((1, 2))

    rows = torch.ones(1, 7, 16, dtype=torch.float64)
    forward, backward = 2 * 7 * 16 * 4, 2 * 7 * 16 * 4  # r = 4, n = 16; only A has a gradient
    assert costs.flops_of_step(method, F, method.init(x, y), [rows]) == forward + backward


def test_hetloras_parameters_and_bytes_are_means_over_its_ranks() -> None:
    """RoBERTa-base, 8 clients, ranks 8 … 12: the paper's 0.35M, not r_max for everybody (442,368)."""
    shapes = {f"layer.{i}.{part}": (768, 768) for i in range(12) for part in ("query", "value")}
    entries = tuple(factor_entries(shapes, "A", "B", 12))
    layout = Layout(entries, sum(e.size for e in entries))
    run = Surroundings(layout, rank=8, clients=8, positions=tuple(range(8)))
    method = HetLoRA.set_up(run, {})
    assert method.ranks == (8, 8, 9, 9, 10, 10, 11, 11)
    state = method.init(torch.zeros(8, layout.size), torch.zeros(8, 0))
    assert costs.parameters(method, Layout((), 0), state).common == 350_208
    sent = costs.sent_bytes(costs.Sent(sum(method.sent_numbers(state, 1)), 8))
    assert (sent.adapter, sent.head) == (4 * 350_208, 0)
    one = HetLoRA.set_up(Surroundings(layout, rank=8, clients=8, positions=(6,)), {})  # as a site has it
    assert one.ranks == (11,)


def test_bytes_are_those_of_the_tensors_sent(world: World) -> None:
    """Pruning makes HETLoRA send less from round to round: the mean over rounds is reported."""
    one = ready(world, "hetlora", rounds=4)
    sent: list[int] = []
    original = type(one.method).send

    def watched(self: Method, s: Any, number: int) -> Any:
        stays, leaves = original(self, s, number)
        heads = sum(e.size for e in self.layout.shared_entries if e.kind == "head")
        sent.extend(int(row[: len(row) - heads].count_nonzero()) + heads for row in leaves)
        return stays, leaves

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(one.method), "send", watched)
        record = finished(one)
    assert len(sent) == 12 and record.bytes_per_round.total == pytest.approx(4 * sum(sent) / len(sent))


def test_seconds_are_the_trainings(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation has its own, so that a method that is measured twice a round does not look slower."""
    original = trial.measure_all

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return original(*args, **options)

    monkeypatch.setattr(trial, "measure_all", slow)
    for method, points in (("homlora", 2), ("local", 1)):
        record = finished(ready(world, method, rounds=2, evaluate_every=1))
        assert record.seconds == pytest.approx(sum(r.seconds for r in record.rounds))
        assert 2 * points * 0.2 <= (record.evaluation_seconds or 0) < 2 * points * 0.2 + 2
        assert record.seconds < 0.2 * points * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process set its peak back")
def test_memory_is_the_methods_own(world: World) -> None:
    """Not the largest there ever was: what somebody took before it began is not its own."""
    one = ready(world, "homlora", rounds=1)
    device = torch.device("cpu")
    costs.start_memory_count(device)
    taken = torch.ones(400_000_000 // 4)
    before = costs.peak_memory(device)
    del taken
    gc.collect()
    record = finished(one)
    assert before is not None and record.peak_memory_bytes is not None
    assert record.peak_memory_bytes < before - 200_000_000


def test_centralized_sees_as_many_examples_as_a_federated_run(world: World, tmp_path: Path) -> None:
    assert ready(world, "centralized", batch_size=4).source.size == 12  # three clients of 4
    assert ready(world, "homlora", batch_size=4).source.size == 4
    assert ready(world, "centralized", batch_size=4, participation=0.5).source.size == 8
    other = {"centralized": {"same_examples": False}}
    assert ready(world, "centralized", batch_size=4, methods=other).source.size == 4
    result = pf2lora.federate(**world.settings(method=["centralized", "homlora"]))
    flops = [m.runs[0].flops_per_round or 0 for m in result.methods.values()]
    assert flops[0] == pytest.approx(flops[1], rel=0.2)  # one learner's large batch is M clients' small ones


def test_no_baseline_takes_another_methods_rate(world: World) -> None:
    """PF2LoRA's client_lr moves a small adapter; Per-FedAvg's step moves all of x, and has a rate of its own."""

    def alpha(name: str, **settings: Any) -> float:
        method = ready(world, name, **settings).method
        assert isinstance(method, Bilevel)
        return method.alpha

    assert alpha("pf2lora", client_lr=0.1) == 0.1
    assert alpha("per-fedavg", client_lr=0.1) == 0.01
    assert alpha("per-fedavg", methods={"per-fedavg": {"adaptation_lr": 0.003}}) == 0.003
