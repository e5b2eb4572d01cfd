"""What memory asks of a run: fewer clients a pass, layers that are run again, or nothing; from two steps' peaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from little_world import make_world
from tiny import tiny_data

from pf2lora.core.method import tensors_of
from pf2lora.engines.local import home_of
from pf2lora.run import baselines, fitting
from pf2lora.run.config import from_settings
from pf2lora.run.fitting import chosen, clients_asked, clients_within, densest, fit_answers, fitted, longest
from pf2lora.run.set_up import Trial, set_up
from pf2lora.run.workload import Workload, load_workload

PLAIN, AGAIN, FIXED = 100, 10, 1000  # bytes of a client's step, and of everything that is there once


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    world = make_world(tmp_path_factory.mktemp("world"))
    return load_workload(from_settings(world.settings(batch_size=4, dropout=0.1), "test"))


@pytest.fixture
def trial(workload: Workload, request: pytest.FixtureRequest) -> Iterator[Trial]:
    settings = getattr(request, "param", {})
    model = replace(workload.config.model, checkpointing=settings.get("checkpointing", "auto"))
    training = replace(workload.config.training, clients_per_pass=settings.get("clients_per_pass", "auto"))
    training = replace(training, participation=settings.get("participation", 1.0))
    config = replace(workload.config, model=model, training=training)
    made = set_up(replace(workload, config=config), "pf2lora", 0, 1)
    yield made
    made.model.remove()


def peak(trial: Trial, clients: int) -> int:
    return FIXED + clients * (AGAIN if trial.model.repeats_layers else PLAIN)


def learners(trial: Trial) -> int:
    return len(trial.source.names)


def test_where_everybody_fits_nothing_changes(trial: Trial) -> None:
    said = chosen(trial, peak, FIXED + learners(trial) * PLAIN)
    assert (trial.room.clients, said) == (None, "") and not trial.model.repeats_layers


def test_large_passes_are_made_smaller(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients keep the device busy: running layers again would cost more."""
    monkeypatch.setattr(fitting, "SATURATED", 2 * fitting.tokens(trial))
    said = chosen(trial, peak, FIXED + 3 * PLAIN)
    assert trial.room.clients == 3
    assert not trial.model.repeats_layers
    everybody = learners(trial)
    assert (
        said
        == f"to fit into the device's memory, 3 of {everybody} clients share a pass (--clients-per-pass 3)"
    )


def test_small_passes_run_layers_again(trial: Trial) -> None:
    said = chosen(trial, peak, FIXED + 3 * PLAIN)
    assert trial.model.repeats_layers and trial.room.clients is None
    assert (
        said == "to fit into the device's memory, layers are run again for the gradient (--checkpointing on)"
    )


def test_both_where_one_is_not_enough(trial: Trial) -> None:
    said = chosen(trial, peak, FIXED + 2 * AGAIN)
    assert trial.model.repeats_layers and trial.room.clients == 2
    assert "run again" in said and "2 of" in said


def test_a_device_without_room_for_one_is_left_to_find_out(trial: Trial) -> None:
    chosen(trial, lambda *_: None, 10)
    assert trial.model.repeats_layers and trial.room.clients == 1


@pytest.mark.parametrize("trial", [{"checkpointing": "off"}, {"checkpointing": "on"}], indirect=True)
def test_what_the_user_says_is_done(trial: Trial) -> None:
    wanted = trial.workload.config.model.checkpointing == "on"
    said = chosen(trial, peak, FIXED + 2 * (AGAIN if wanted else PLAIN))
    assert trial.model.repeats_layers is wanted and trial.room.clients == 2
    assert "run again" not in said  # nobody needs to be told what they asked for


@pytest.mark.parametrize("trial", [{"clients_per_pass": 2}], indirect=True)
def test_no_more_than_the_user_lets_share_a_pass(trial: Trial) -> None:
    assert clients_asked(trial) == 2
    said = chosen(trial, peak, FIXED + 2 * PLAIN)
    assert (trial.room.clients, said) == (2, "")


def test_how_many_fit(trial: Trial) -> None:
    assert clients_within(trial, peak, FIXED + PLAIN - 1, 4) == 0
    assert clients_within(trial, peak, FIXED + PLAIN, 4) == 1
    assert clients_within(trial, peak, FIXED + 4 * PLAIN - 1, 4) == 3
    assert clients_within(trial, lambda _, clients: 5 if clients == 1 else None, 10, 4) == 1
    assert clients_within(trial, lambda _, clients: 5, 10, 4) >= 4  # a step that takes nothing to speak of


def test_the_measured_step_has_the_longest_rows(trial: Trial) -> None:
    batch = longest(trial.source.data, 2, trial.source.size, keyed=trial.source.keyed)
    assert batch.length == trial.source.data.lengths.max() and batch.clients == 2
    state = trial.method.init(trial.state.x[:2], trial.state.y[:2])
    _, stats = trial.method.step(trial.F, state, *[batch] * trial.method.draws)
    assert torch.isfinite(stats.loss).all()


def test_on_a_cpu_nothing_is_measured(trial: Trial) -> None:
    assert fitted(trial) == (trial, "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device's memory is measured")
def test_the_peak_of_a_step_grows_with_its_clients(tmp_path_factory: pytest.TempPathFactory) -> None:
    world = make_world(tmp_path_factory.mktemp("world"))
    workload = load_workload(from_settings(world.settings(batch_size=64, device="cuda"), "test"))
    made = set_up(workload, "pf2lora", 0)
    fitting.peak_of_step(made, 1)  # libraries set up their workspaces
    one, two = (fitting.peak_of_step(made, clients) for clients in (1, 2))
    assert one is not None and two is not None and one < two
    found, said = fitted(made)
    assert (found.room.clients, said) == (None, "")
    tight = two - (two - one) // 2
    said = chosen(made, fitting.peak_of_step, tight)
    assert said and (made.model.repeats_layers or made.room.clients == 1)
    made.model.remove()


def test_a_batch_in_parts_where_one_client_is_too_much(trial: Trial) -> None:
    def by_rows(trial: Trial, clients: int) -> int:
        return FIXED + clients * AGAIN * (trial.room.rows or trial.source.size)

    said = chosen(trial, by_rows, FIXED + AGAIN)
    assert (trial.room.rows, trial.room.clients) == (1, 1)
    assert "a batch's rows are computed 1 at a time (--micro-batch 1)" in said


@pytest.mark.parametrize("trial", [{"participation": 0.4}], indirect=True)
def test_who_does_not_take_part_waits_on_the_host_where_all_would_not_fit(trial: Trial) -> None:
    """Four of six learners take part. A pass of all of them, as there is at the end, and all of their states fit: all
    stay on the device. They do not: there is room for those who take part alone."""
    asked, states = clients_asked(trial), sum(t.nbytes for t in tensors_of(trial.state))
    assert asked == 4 < learners(trial) == 6
    everybody = FIXED + 6 * PLAIN + fitting.COPIES * states
    assert chosen(trial, peak, everybody) == "" and trial.room.clients is None
    assert chosen(trial, peak, everybody - 1) == "" and trial.room.clients == asked
    assert home_of(6, trial.room, torch.device("cuda")).type == "cpu"


def test_answers_have_room_of_their_own(trial: Trial) -> None:
    rooms, everybody = trial.workload.task.rooms, learners(trial)
    fit_answers(trial, peak, FIXED + everybody * PLAIN)
    tokens = everybody * int(trial.workload.test.lengths.max())
    assert (rooms.answering.clients, rooms.answering.rows) == (None, fitting.ANSWERED // tokens)
    fit_answers(trial, peak, FIXED + 2 * PLAIN)
    assert (rooms.answering.clients, rooms.answering.rows) == (2, None) and rooms.training.clients is None

    def by_rows(trial: Trial, clients: int) -> int:
        return FIXED + clients * (rooms.answering.rows or trial.workload.task.evaluation_batch)

    fit_answers(trial, by_rows, FIXED + 20)
    assert (rooms.answering.clients, rooms.answering.rows) == (1, 16)
    fit_answers(trial, lambda *_: None, 10)
    assert (rooms.answering.clients, rooms.answering.rows) == (1, 1)  # which is left to find out


def test_passes_of_answers_are_no_larger_than_keeps_the_device_busy(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, room = trial.workload.task.evaluation_batch, trial.workload.task.rooms.answering
    tokens = learners(trial) * int(trial.workload.test.lengths.max())
    plenty = FIXED + learners(trial) * PLAIN
    for rows, expected in ((batch, None), (batch + 1, batch + 1)):
        monkeypatch.setattr(fitting, "ANSWERED", rows * tokens)
        fit_answers(trial, peak, plenty)
        assert (room.clients, room.rows) == (None, expected)


def test_answers_are_measured_with_the_most_predicted_tokens() -> None:
    """A pass of short rows has as many tokens as one of the longest, and they may be all to be predicted."""
    data = replace(tiny_data((6, 5)), targets=None)
    assert densest(data) is data
    lengths = data.lengths
    assert lengths.max() > 2 * lengths.min()
    targets = np.where(lengths == lengths.min(), lengths, 1)
    data = replace(data, targets=targets)
    tokens, rows = 4 * int(lengths.max()), 4 * int(lengths.max()) // int(lengths.min())
    shortest = np.repeat(np.argmin(lengths), rows)
    predicted = data.most_targets(shortest, int(lengths.min()))
    assert predicted is not None and tokens - lengths.min() < predicted <= tokens
    assert longest(data, 1, 4).targets != tokens and longest(densest(data), 1, 4).targets == tokens


def test_baselines_are_fitted_before_they_are_measured(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def fitted_to_answer(trial: Trial) -> Trial:
        calls.append("fitted")
        return trial

    measure_all = baselines.measure_all

    def measured(*args: Any) -> Any:
        calls.append("measured")
        return measure_all(*args)

    monkeypatch.setattr(baselines, "fitted_to_answer", fitted_to_answer)
    monkeypatch.setattr(baselines, "measure_all", measured)
    baselines.untrained(workload)
    assert calls == ["fitted", "measured"]
