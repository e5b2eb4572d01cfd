"""The rates of steps alone after the last round: 1/√K of the run's, for the K clients whose mean they begin with."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, make_world, opened, sentences, write_jsonl

import pf2lora
from pf2lora.core.method import State
from pf2lora.core.rates import CONSTANT, alone_factor
from pf2lora.engines.local import train
from pf2lora.engines.rates import Rates
from pf2lora.methods import METHODS
from pf2lora.run import joining
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.deploy import alone
from pf2lora.run.onboarding import onboard, read_client
from pf2lora.run.set_up import Trial, set_up

ALONE = 1 / math.sqrt(3)  # there are three clients


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("steps alone"))


def trial_of(world: World, name: str, place: tuple[int, int] | None = None, **changes: Any) -> Trial:
    settings = {"validation_ratio": 0.2, "client_lr": "auto"} | changes
    workload = prepare(from_settings(world.settings(**settings, method=[name]), "test"))
    if place is not None:
        workload = replace(workload, clients=workload.clients[:1])
    trial = set_up(workload, name, 0, place=place)
    return trial


@pytest.mark.parametrize("name", METHODS.own)
def test_every_method_with_a_server_has_them(name: str, world: World) -> None:
    trial = trial_of(world, name)
    trial.model.remove()
    assert trial.schedule.alone == pytest.approx(ALONE if METHODS[name].federated else 1.0)


@pytest.mark.parametrize(
    ("place", "changes", "expected"),
    [
        (None, {"participation": 0.6}, 1 / math.sqrt(2)),
        ((2, 4), {}, 1 / 2),  # a site that sees one client of four
        ((2, 50), {}, 1 / math.sqrt(8)),  # of more than were measured
        (None, {"personal_steps": 0}, 1.0),
        (None, {"validation_ratio": 0}, 1.0),  # nothing to choose by, so nothing is tried
    ],
)
def test_of_how_many_clients(
    place: tuple[int, int] | None, changes: dict[str, Any], expected: float, world: World
) -> None:
    trial = trial_of(world, "homlora", place, **changes)
    trial.model.remove()
    assert trial.schedule.alone == pytest.approx(expected)


def test_which_rates_change() -> None:
    """Those that a schedule changes, whatever else differs between federations side by side; no word."""
    rates = Rates(CONSTANT, 2, 3, 2, ({"lr": 0.1, "weight_decay": 0.3}, {}), alone=0.5)
    like = torch.zeros(4, 1, dtype=torch.float64)
    method: Any = METHODS["pf2lora"](layout=None, lr=0.2, client_lr="auto", weight_decay=0.0)  # type: ignore[call-arg, arg-type]
    found = rates.outside(method, range(4), like, alone=True)
    assert {name: value.flatten().tolist() for name, value in found.items()} == {
        "lr": [0.05, 0.05, 0.1, 0.1],
        "weight_decay": [0.3, 0.3, 0.0, 0.0],
    }
    fixed = replace(rates, own=()).outside(replace(method, client_lr=0.4), range(4), like, alone=True)
    assert {name: value.flatten().tolist() for name, value in fixed.items()} == {
        "lr": [0.1] * 4,
        "client_lr": [0.2] * 4,
    }
    assert replace(rates, own=(), alone=1.0).outside(method, range(4), like, alone=True) == {}
    assert set(rates.outside(method, range(4), like)) == {
        "lr",
        "weight_decay",
    }  # the federations' own, as they are


@pytest.mark.parametrize(("name", "client_lr"), [("homlora", 0.1), ("pf2lora", 0.1), ("pf2lora", "auto")])
def test_they_are_the_methods_steps_with_smaller_rates(name: str, client_lr: Any, world: World) -> None:
    """From the last round's state, by hand; the rounds themselves are those of a run that tries no steps alone."""
    trial = trial_of(world, name, client_lr=client_lr, rounds=2)
    *_, done = train(trial.method, trial.F, trial.state, trial.source, trial.schedule, stepper=trial.stepper)
    plain = replace(trial.schedule, alone=1.0)
    *_, same = train(trial.method, trial.F, trial.state, trial.source, plain, stepper=trial.stepper)
    torch.testing.assert_close(done.served.x, same.served.x, rtol=1e-4, atol=1e-5)
    (_, found) = alone(trial, done.served, done.number, 2)

    rates = {"lr": trial.method.lr * ALONE}
    if client_lr != "auto":
        rates["client_lr"] = 0.1 * ALONE
    own: dict[str, Any] = {key: value for key, value in rates.items() if hasattr(trial.method, key)}
    method = replace(trial.method, **own)
    state, steps, clients = done.served, trial.schedule.steps, range(3)
    for step in range(2 * steps):
        number = (done.number * steps + step) * method.draws
        batches = [trial.source.draw(list(clients), [number + i] * 3) for i in range(method.draws)]
        state, _ = method.step(trial.F, State(*state), *batches)
    trial.model.remove()
    torch.testing.assert_close(found.common, state.x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.personal, state.y, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found.common, done.served.x, atol=1e-4)


def test_a_newcomers_steps_from_what_it_is_served_have_them_and_those_from_the_beginning_not(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pf2lora.federate(
        **world.settings(method=["homlora"], validation_ratio=0.2, client_lr="auto", out=tmp_path / "run")
    )
    seen: list[float] = []

    def told(trial: Trial, *rest: Any) -> Any:
        seen.append(trial.schedule.alone)
        return alone(trial, *rest)

    monkeypatch.setattr(joining, "alone", told)
    run = opened(tmp_path / "run")
    for name in ("east", "centre"):  # who joined first is none of those that were averaged
        file = write_jsonl(tmp_path / f"{name}.jsonl", sentences(60, 9))
        onboard(run, name, file, 1)
        run = opened(tmp_path / "run")
    assert seen == pytest.approx([ALONE, 1 / math.sqrt(8)] * 2) and alone_factor(1) == 1
    config = replace(run.config, training=replace(run.config.training, lr=0.01))
    given = joining.Joining(replace(run, config=config), read_client(run, name, file), 1)
    assert given.slower == pytest.approx(
        {joining.PERSONAL: ALONE, joining.LOCAL: 1.0}
    )  # a number stays what it is
