"""Seeds side by side: a run with several seeds is the runs with one seed each, which share passes and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, make_world
from tiny_tasks import write_generation_task, write_question_task
from torch import Tensor

from pf2lora.core.method import over_tensors
from pf2lora.engines.batches import window_order
from pf2lora.engines.local import Round, by_server, to_learners, train
from pf2lora.engines.share import Share
from pf2lora.methods import METHODS
from pf2lora.methods.homlora import HomLoRA
from pf2lora.run.config import from_settings
from pf2lora.run.result import SeedRun
from pf2lora.run.set_up import set_up
from pf2lora.run.trial import Outcome, run
from pf2lora.run.workload import Workload, load_workload

SEEDS = (3, 5, 4)
SHORT: dict[str, Any] = {
    "rounds": 3,
    "steps": 2,
    "batch_size": 4,
    "rank": 4,
    "client_rank": 2,
    "lr": 0.01,
    "client_lr": 0.1,
    "validation_ratio": 0,
    "device": "cpu",
    "participation": 0.6,  # two of three
    "weighting": "size",
    "methods": {"per-fedavg": {"adaptation_lr": 0.05}},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def in_doubles(settings: dict[str, Any]) -> Workload:
    """The workload in float64: what differs is then more than rounding."""
    workload = load_workload(from_settings(settings, "test"))
    workload.base.double()
    return workload


def rounds(workload: Workload, name: str, *seeds: int, **schedule: Any) -> tuple[list[Round], int]:
    """The rounds with these seeds, and how many learners there are for each."""
    trial = set_up(workload, name, *seeds)
    state = over_tensors(lambda t: t.double() if t.is_floating_point() else t, trial.state)
    plan = replace(trial.schedule, **schedule)
    found = [done.kept() for done in train(trial.method, trial.F, state, trial.source, plan)]
    trial.model.remove()
    return found, len(trial.source.clients)


def assert_close(found: Tensor, expected: Tensor) -> Tensor:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, equal_nan=True)
    return found


def assert_seeds_are_alone(workload: Workload, name: str, **schedule: Any) -> None:
    together, learners = rounds(workload, name, *SEEDS, **schedule)
    ends = []
    for s, seed in enumerate(SEEDS):
        own = slice(s * learners, (s + 1) * learners)
        alone, _ = rounds(workload, name, seed, **schedule)
        for whole, one in zip(together, alone, strict=True):
            columns = [c for c, i in enumerate(whole.participants) if own.start <= i < own.stop]
            assert [whole.participants[c] - own.start for c in columns] == one.participants
            for figures, figures_alone in zip(whole.stats, one.stats):
                assert (figures is None) == (figures_alone is None)
                if figures is not None and figures_alone is not None:
                    assert_close(figures[:, columns], figures_alone)
            for states, states_alone in ((whole.before, one.before), (whole.served, one.served)):
                own_states = over_tensors(lambda t: t[own], states)  # noqa: B023
                over_tensors(assert_close, own_states, states_alone)
            assert_close(whole.common[s], one.common[0])
        ends.append(together[-1].served.x[own])
    assert together[0].common.shape[0] == len(SEEDS)
    if learners > 1:
        assert all(len(done.participants) == 2 * len(SEEDS) for done in together)
        drawn = [[i % learners for i in together[0].participants[2 * s : 2 * s + 2]] for s in range(3)]
        assert len(set(map(tuple, drawn))) > 1  # each seed draws its own
    for s, end in enumerate(ends):  # seeds are different runs
        assert (end - ends[s - 1]).abs().max() > 1e-3


@pytest.mark.no_cover
@pytest.mark.parametrize("per_pass", [None, 2, 4])
@pytest.mark.parametrize("name", METHODS.own)
def test_a_seed_does_not_notice_the_others(name: str, per_pass: int | None, world: World) -> None:
    """Every state, what the optimizers keep, the losses and the common vectors; two of three clients take part."""
    settings = SHORT | {
        "model": str(world.model),
        "clients": [str(p) for p in world.clients],
        "method": [name],
    }
    workload = in_doubles(settings | {"max_length": 16, "dropout": 0.2})
    assert_seeds_are_alone(workload, name, clients_per_pass=per_pass)


@pytest.mark.parametrize(
    ("task", "write", "own"),
    [
        ("question-answering", write_question_task, {"max_length": 64, "stride": 8}),
        ("generation", write_generation_task, {"max_length": 64}),
    ],
    ids=["question-answering", "generation"],
)
def test_nor_on_another_task(
    task: str, write: Callable[..., tuple[Path, list[Path]]], own: dict[str, Any], tmp_path: Path
) -> None:
    model, files = write(tmp_path, ["north", "south", "west"])
    clients = [str(path) for path in files]
    settings = SHORT | own | {"task": task, "model": str(model), "clients": clients, "method": ["pf2lora"]}
    assert_seeds_are_alone(in_doubles(settings), "pf2lora", clients_per_pass=4)


def test_the_servers_average_apart() -> None:
    """By hand: two federations whose learners sent 1, 3 and 10, 20, 60, of clients with 1, 3 and 1, 1, 2 rows."""
    method = HomLoRA(None)  # type: ignore[arg-type]
    sent = torch.tensor([[1.0], [3.0], [10.0], [20.0], [60.0]])
    sizes, federations = [1, 3, 9, 1, 1, 2], [[0, 1], [3, 4, 5]]
    uniform = [*by_server(sent, federations, Share.of_one(3), sizes, "uniform", 7)]
    assert [method.merge(own, ())[0].tolist() for own in uniform] == [[2.0], [30.0]]
    assert [(own.clients, own.round) for own in uniform] == [((0, 1), 7), ((0, 1, 2), 7)]
    by_size = [
        method.merge(own, ())[0].item()
        for own in by_server(sent, federations, Share.of_one(3), sizes, "size", 7)
    ]
    assert by_size == pytest.approx([2.5, 37.5])
    learners = to_learners(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), Share.of_one(3))
    assert learners.tolist() == [[1.0, 2.0]] * 3 + [[3.0, 4.0]] * 3
    each = torch.arange(6.0).view(2, 3, 1)  # an answer for each client
    assert to_learners(each, Share.of_one(3)).tolist() == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]]


def test_long_batches_meet_long_ones_of_every_seed() -> None:
    """A window's order is the same for all, and no order at all would be by length."""
    orders = [window_order(window, 16).tolist() for window in range(4)]
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


# ---- a whole run, with validation rows and sizes that clients find ----


@pytest.fixture(scope="module")
def choosing(world: World) -> Workload:
    settings = world.settings(client_lr="auto", validation_ratio=0.2, rounds=3, participation=0.6)
    return load_workload(from_settings(settings, "test"))


@pytest.mark.no_cover
@pytest.mark.parametrize("name", METHODS.own)
def test_what_is_measured_and_deployed_is_what_it_was_with_one_seed(name: str, choosing: Workload) -> None:
    """Scores, validation losses, and the models that clients choose; in float32."""
    together = outcomes(choosing, name, 2, 3)
    for whole, seed in zip(together, (2, 3), strict=True):
        (one,) = outcomes(choosing, name, seed)
        assert whole.record.seed == one.record.seed == seed
        assert whole.record.choices is not None and one.record.choices is not None
        assert [(c.candidate, c.round) for c in whole.record.choices] == [
            (c.candidate, c.round) for c in one.record.choices
        ]
        assert numbers(whole.record) == pytest.approx(numbers(one.record), rel=1e-4, abs=1e-5)
        assert whole.record.bytes_per_round == one.record.bytes_per_round
        torch.testing.assert_close(whole.common_of_client, one.common_of_client, rtol=0, atol=1e-5)
        torch.testing.assert_close(whole.personal_of_client, one.personal_of_client, rtol=0, atol=1e-5)
        assert (whole.common is None) == (one.common is None)
        if whole.common is not None and one.common is not None:
            torch.testing.assert_close(whole.common, one.common, rtol=0, atol=1e-5)
    first, second = (whole.common_of_client for whole in together)
    assert (first - second).abs().max() > 1e-3


def outcomes(workload: Workload, name: str, *seeds: int) -> list[Outcome]:
    trial = set_up(workload, name, *seeds)
    told: list[int] = []
    found = run(trial, lambda seed, record: told.append(seed))
    assert told == [*seeds] * trial.schedule.rounds
    trial.model.remove()
    return found


def numbers(record: SeedRun) -> list[float]:
    """What a run reports, in one row."""
    found: list[float | None] = []
    for one in record.rounds:
        for values in (one.train_loss, one.validation_loss, one.client_share):
            found += values or []
    for choice in record.choices or []:
        found += [choice.validation_loss, *choice.last_round.values()]
    for over in (record.served, record.before_averaging, record.deploy):
        for scores in (over or {}).values():
            found += scores.per_client
    return [-1.0 if value is None else value for value in found]
