"""Scores at both points of a round: whose state they are of, and what is done with one that is no number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from little_world import LEARNING, World, make_world

from pf2lora.data.loading import filled_in
from pf2lora.engines.local import Round, train
from pf2lora.run import trial
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.evaluation import measure, models_in_use, not_finite, over_clients
from pf2lora.run.result import OverClients
from pf2lora.run.set_up import Trial, set_up
from pf2lora.tasks.classification.rows import TextRow
from pf2lora.tasks.classification.task import METRICS, Classification


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def ready(world: World, **changes: Any) -> Trial:
    config = from_settings(world.settings(**changes))
    return set_up(prepare(config), config.training.method[0], 0)


def test_each_point_is_measured_with_its_own_state(world: World) -> None:
    """Served is after the average came back, before averaging after the local steps: they differ."""
    settings = LEARNING | {"rounds": 3, "method": ["homlora"]}
    (outcome,) = trial.run(one := ready(world, **settings), lambda seed, record: None)
    record = outcome.record
    *_, last = train(one.method, one.F, one.state, one.source, one.schedule)
    assert isinstance(last, Round)
    for point, state in ((record.served, last.served), (record.before_averaging, last.before)):
        expected = measure(one, models_in_use(one, state, 3)).scores
        assert point is not None
        assert point["loss"].per_client == pytest.approx(expected["loss"], abs=1e-6)
    assert record.before_averaging is not None
    assert record.served["loss"].per_client != pytest.approx(
        record.before_averaging["loss"].per_client, abs=1e-3
    )


def test_the_mean_is_over_all_clients() -> None:
    up, down = METRICS["accuracy"], METRICS["loss"]
    about: Any = pytest.approx
    assert over_clients([0.5, 0.9, 1.0], up) == OverClients(
        [0.5, 0.9, 1.0], about(0.8), 0.5, about(np.std([0.5, 0.9, 1.0]))
    )
    assert over_clients([0.5, 2.0], down).worst == 2.0
    assert over_clients([0.5, None, 0.7], up) == OverClients([0.5, None, 0.7], about(0.6), 0.5, about(0.1))
    assert over_clients([None, None], up) == OverClients([None, None], None, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_does_not_drop_out_of_a_mean(bad: float) -> None:
    assert over_clients([0.5, bad], METRICS["loss"]) == OverClients([0.5, None], None, None, None)
    (line,) = not_finite(["north", "south"], METRICS, {"accuracy": [0.5, 0.5], "loss": [0.3, bad]})
    assert "client 'south'" in line and "test loss" in line
    assert not_finite(["north"], METRICS, {"matthews": [None]}) == []  # undefined is not diverged


def test_outputs_that_are_no_numbers_are_wrong_answers() -> None:
    """And not the first label."""
    task = Classification(None, ["no", "yes"])  # type: ignore[arg-type]
    rows = [TextRow("a", "no"), TextRow("b", "yes"), TextRow("c", "no")]
    broken = [np.array([math.nan, math.nan]), np.array([0.0, 1.0]), np.array([2.0, 1.0])]
    scores = task.score(broken, rows)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    loss = scores["loss"]
    assert loss is not None and math.isnan(loss)
    assert task.score(broken[1:], rows[1:])["accuracy"] == 1.0


def test_a_diverged_client_is_warned_of(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Classification.logits

    def broken(self: Classification, model: Any, x: Any, y: Any, batch: Any) -> Any:
        found = original(self, model, x, y, batch)
        return found if torch.is_grad_enabled() else found * math.nan

    monkeypatch.setattr(Classification, "logits", broken)
    (outcome,) = trial.run(ready(world, rounds=1), lambda seed, record: None)
    record = outcome.record
    assert record.served["accuracy"].mean == 0.0 and record.served["loss"].mean is None
    assert sum("its model's outputs are not finite" in line for line in record.warnings) == 3


@pytest.mark.parametrize(
    ("dataset", "h", "clients"), [("cola", 0.3, 8), ("sst2", 0.9, 8), ("squad", 0.5, 4), ("squad_v2", 0.5, 4)]
)
def test_a_data_set_is_shared_out_as_in_the_paper(dataset: str, h: float, clients: int) -> None:
    task = "question-answering" if dataset.startswith("squad") else "classification"
    config = from_settings({"task": task, "dataset": dataset})
    found = filled_in(config.task, config.data)
    assert (found.heterogeneity, found.num_clients, found.partition) == (h, clients, "heterogeneity")
    said = from_settings({"task": task, "dataset": dataset, "heterogeneity": 0.0, "num_clients": 2})
    found = filled_in(said.task, said.data)
    assert (found.heterogeneity, found.num_clients) == (0.0, 2)
