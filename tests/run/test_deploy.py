"""What each client deploys: who takes what, by hand; and that the adapters of a run folder are just that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deployments import after, models, seen
from little_world import LEARNING, World, make_world, opened, sentences, write_jsonl
from stand_in_graphs import StandInGraph
from torch import Tensor

import pf2lora
from pf2lora.core.method import State
from pf2lora.engines.stepper import GraphStepper, signature
from pf2lora.run import deploy, set_up
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.deploy import BEFORE, COMMON, PERSONAL, SERVED, Deployment
from pf2lora.run.evaluation import Models
from pf2lora.run.result import Choice, Result, load_result
from pf2lora.run.saved import read_config

NAN = float("nan")
VALIDATED: dict[str, Any] = {"validation_ratio": 0.2, "client_lr": "auto"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


# ---- by hand ----


def test_who_takes_what(deployment: Any) -> None:
    found = deployment(5)
    early = models([9.0] * 4, [9.0] * 4, [1.0] * 4, [9.0] * 4, [NAN] * 4)
    found.look(after(1), {SERVED: early}, None)
    # What is served last, and what each had before: better on every row; better on some by an accident; worse; a client
    # without rows.
    served = models([2.0] * 4, [2.0] * 4, [2.0] * 4, [2.0] * 4, [NAN] * 4)
    before = models([1.9] * 4, [1.0, 2.6, 1.6, 2.4], [1.8] * 4, [2.1] * 4, [NAN] * 4)
    losses = found.look(after(2), {SERVED: served, BEFORE: before}, None)
    assert losses[:4].tolist() == [2.0] * 4 and losses[4].isnan()
    assert seen(found) == [(BEFORE, 2), (SERVED, 2), (SERVED, 1), (SERVED, 2), (SERVED, 2)]
    first, accident, earlier, _, without = found.choices()
    assert first == Choice(BEFORE, 2, 1.9, {SERVED: 2.0, BEFORE: 1.9})
    assert accident.validation_loss == 2.0 and accident.last_round[BEFORE] == pytest.approx(1.9)
    assert earlier.validation_loss == 1.0 and earlier.last_round == {SERVED: 2.0, BEFORE: 1.8}
    assert without == Choice(SERVED, 2, None, {SERVED: None, BEFORE: None})
    # The models are those of the choices, whole: x and y of one candidate.
    assert found.models.common[:4, 0].tolist() == [1.9, 2.0, 1.0, 2.0]
    assert found.models.personal[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_lower_loss_with_a_worse_score_is_not_taken(deployment: Any) -> None:
    found = deployment(4)
    served = models(*[[2.0] * 3] * 4, scores=[0.5, 0.5, 0.5, NAN])
    before = models(*[[1.0] * 3] * 4, scores=[0.6, 0.5, 0.4, NAN])
    found.look(after(1), {SERVED: served, BEFORE: before}, None)
    assert [candidate for candidate, _ in seen(found)] == [BEFORE, BEFORE, SERVED, SERVED]


def test_caution_is_a_standard_error_of_the_difference(deployment: Any) -> None:
    """Differences 0.3 ± d on two rows: their mean is 0.3, its standard error d."""
    for d, taken in ((0.29, BEFORE), (0.31, SERVED)):
        found = deployment(1)
        offered = {SERVED: models([2.0, 2.0]), BEFORE: models([1.7 + d, 1.7 - d])}
        found.look(after(1), offered, None)
        assert seen(found) == [(taken, 1)]
    one_row = deployment(1)
    one_row.look(after(1), {SERVED: models([2.0]), BEFORE: models([0.1])}, None)
    assert seen(one_row) == [(SERVED, 1)]  # one row says nothing


def test_keep_last_looks_at_the_last_round_alone(deployment: Any) -> None:
    found = deployment(2, keep="last")
    found.look(after(1), {SERVED: models([0.1] * 3, [0.1] * 3)}, torch.tensor([[1.0]]))
    offered = {SERVED: models([2.0] * 3, [2.0] * 3), BEFORE: models([1.0] * 3, [3.0] * 3)}
    found.look(after(2), offered, torch.tensor([[2.0]]))
    assert seen(found) == [(BEFORE, 2), (SERVED, 2)]
    assert [(vector.tolist(), number) for _, vector, number in found.common] == [([2.0], 2)]


def test_a_model_that_is_no_number_is_not_deployed(deployment: Any) -> None:
    found = deployment(2)
    inf = float("inf")
    offered = {SERVED: models([inf, inf], [1.0, 1.0]), BEFORE: models([1.0, 1.0], [inf, inf])}
    found.look(after(1), offered, None)
    assert seen(found)[1] == (SERVED, 1)


def test_the_common_adapter_is_that_of_the_round_with_the_least_mean_loss(deployment: Any) -> None:
    """Of each seed by itself; a method whose common adapter is another thing than what is served is judged by that."""
    found = deployment(2, seeds=(0, 1))
    rounds = [(5.0, 1.0, 2.0, 2.0), (1.0, 3.0, 3.0, 3.0), (3.0, 3.0, 1.0, NAN)]
    for number, losses in enumerate(rounds, 1):
        common = torch.tensor([[float(number)], [10.0 * number]])
        found.look(after(number), {SERVED: models(*([loss] * 2 for loss in losses))}, common)
    assert [(mean, vector.item(), number) for mean, vector, number in found.common] == [
        (2.0, 2.0, 2),
        (1.0, 30.0, 3),
    ]
    judged = deployment(1)
    for number, alone in enumerate((4.0, 3.0, 5.0), 1):
        offered = {SERVED: models([1.0 / number] * 2), COMMON: models([alone] * 2)}
        judged.look(after(number), offered, torch.tensor([[float(number)]]))
    assert judged.common[0][1].item() == 2.0


def test_personal_steps_are_tried_round_by_round_and_the_best_is_kept(
    deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = deployment(2)
    found.trial.method.resizes = False
    asked: list[tuple[int, int]] = []

    def alone(trial: Any, state: Any, number: int, rounds: int) -> Any:
        asked.append((number, rounds))
        yield models([1.5] * 2, [1.0] * 2)
        yield models([1.0] * 2, [1.5] * 2)

    monkeypatch.setattr(deploy, "alone", alone)
    served = models([2.0] * 2, [1.2] * 2)
    found.look(after(4), {SERVED: served}, None)
    found.trial.schedule = SimpleNamespace(steps=10)
    found.trial.workload.config.training.steps = 10
    done: Any = SimpleNamespace(number=4, served=None)
    assert found.try_personal_steps(done, served) is None  # 0 steps: none
    for steps, rounds in ((None, deploy.PERSONAL_ROUNDS), (1, 1), (10, 1), (11, 2)):
        found.trial.workload.config.training.personal_steps = steps
        tried = found.try_personal_steps(done, served)
        assert asked[-1] == (4, rounds) and tried.common[:, 0].tolist() == [1.0, 1.0]
    assert seen(found) == [(PERSONAL, 4), (PERSONAL, 4)]
    assert [c.last_round[PERSONAL] for c in found.choices()] == [1.0, 1.0]


@pytest.mark.parametrize("resizes", [True, False])
def test_personal_steps_begin_with_the_adapter_that_is_served(
    deployment: Any, monkeypatch: pytest.MonkeyPatch, resizes: bool
) -> None:
    """x as the average left it, and, of a method that finds sizes, y in the size that is served; where the served
    models are adapted for use alone, as Per-FedAvg's are, they are no state to go on from."""
    found = deployment(2)
    found.trial.method.resizes = resizes
    found.trial.workload.config.training.personal_steps, found.trial.workload.config.training.steps = 1, 1
    begun: list[State] = []

    def alone(trial: Any, state: State, number: int, rounds: int) -> Any:
        begun.append(state)
        yield models([1.0] * 2, [1.0] * 2)

    monkeypatch.setattr(deploy, "alone", alone)
    served, after_average = models([2.0] * 2, [2.0] * 2), State(torch.zeros(2, 2), torch.ones(2, 2), ())
    found.look(after(4), {SERVED: served}, None)
    done: Any = SimpleNamespace(number=4, served=after_average)
    found.try_personal_steps(done, served)
    ((x, y, _),) = begun
    assert x is after_average.x and y is (served.personal if resizes else after_average.y)


# ---- in a run ----


def run_folder(world: World, out: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Result:
    """A run in which whoever finds anything that may be better takes it."""
    monkeypatch.setattr(deploy, "CAUTION", -0.2)
    monkeypatch.setattr(deploy, "scores", lambda trial, models: torch.zeros(len(models.common)))
    settings = LEARNING | {"rounds": 6, "evaluate_every": 2} | VALIDATED | changes
    return pf2lora.federate(**world.settings(**settings), out=out)


@pytest.mark.parametrize("method", ["pf2lora", "homlora", "per-fedavg", "centralized", "local"])
def test_the_adapters_of_a_run_folder_are_those_deployed(
    method: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lr = 0.03 if method == "local" else 0.006  # such that not everybody deploys what is served
    result = run_folder(world, tmp_path / "run", monkeypatch, method=method, lr=lr)
    assert load_result(tmp_path / "run").to_dict() == result.to_dict()
    (run,) = result.methods[method].runs
    assert run.choices is not None and run.deploy is not None
    assert any((c.candidate, c.round) != (SERVED, 6) for c in run.choices)
    config = read_config(tmp_path / "run")
    loaded, clients = opened(tmp_path / "run"), prepare(config).clients
    for k, client in enumerate(clients):
        for point, rows in ((run.deploy["loss"].per_client[k], client.test), (None, client.validation)):
            found = loaded.task.score(loaded.answers(client.name, rows), rows)["loss"]
            expected = run.choices[k].validation_loss if point is None else point
            assert found == pytest.approx(expected, abs=1e-5)
    loaded.model.remove()
    saved = json.loads((tmp_path / "run" / "state" / "run.json").read_text())
    assert not saved["shares_one_model"]


def test_a_run_with_the_last_round_kept_deploys_nothing_older(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_folder(world, tmp_path / "run", monkeypatch, method="homlora", keep="last")
    (run,) = result.methods["homlora"].runs
    assert {c.round for c in run.choices or []} == {6}
    assert set(run.candidates) == {SERVED, BEFORE, PERSONAL}
    none = pf2lora.federate(**world.settings(**LEARNING | VALIDATED | {"rounds": 2}, personal_steps=0))
    assert PERSONAL not in none.methods["pf2lora"].runs[0].candidates


@pytest.mark.parametrize("method", ["pf2lora", "homlora"])
def test_steps_alone_replay_what_the_rounds_recorded(
    method: str, world: World, stand_in_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[GraphStepper] = []

    def recorded(F: Any, device: Any, *, graphs: bool) -> GraphStepper:
        made.append(GraphStepper(F))
        return made[-1]

    monkeypatch.setattr(set_up, "make_stepper", recorded)
    records, rounds_over = [], []
    record, alone = GraphStepper.record, deploy.alone

    def counted(self: GraphStepper, *args: Any) -> Any:
        records.append(signature(*args[1:3]))
        return record(self, *args)

    def begun(*args: Any) -> Any:
        rounds_over.append((len(records), StandInGraph.replays))
        return alone(*args)

    monkeypatch.setattr(GraphStepper, "record", counted)
    monkeypatch.setattr(deploy, "alone", begun)
    StandInGraph.replays = 0
    settings = LEARNING | VALIDATED | {"rounds": 4, "method": method}
    pf2lora.federate(**world.settings(**settings))
    ((recorded_in_rounds, replayed_in_rounds),) = rounds_over
    assert len(made) == 1 and len(set(records)) == len(records)
    assert (
        len(records) - recorded_in_rounds < StandInGraph.replays - replayed_in_rounds
    )  # but for new lengths


@pytest.mark.usefixtures("one_thread")
def test_a_client_whose_own_adapter_harms_is_served_the_common_one_at_least(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole run, for each client and measured round: what is served is no worse on the client's validation rows
    than the common adapter alone. Each client trains on one label and is judged by the other, so that its adapter does
    harm, and so does its bias of the head, which no size takes back."""
    parts: dict[str, list[str]] = {"clients": [], "validation": []}
    for i, most in enumerate(("pos", "neg", "neg")):
        rows = sentences(160, i)
        own, other = ([row for row in rows if (row["label"] == most) == is_own] for is_own in (True, False))
        for part, found in (("clients", own + other[:4]), ("validation", other[4:24])):
            parts[part].append(str(write_jsonl(tmp_path / part / f"{i}.jsonl", found)))
    seen: list[Tensor] = []
    look = Deployment.look

    def looked(self: Deployment, done: Any, *rest: Any) -> Any:
        losses = look(self, done, *rest)
        unsized = self.judge(Models(done.served.x, done.served.y))[0].nanmean(1)
        seen.append(torch.stack([unsized, self.last[SERVED].mean_losses(), self.last[COMMON].mean_losses()]))
        return losses

    monkeypatch.setattr(Deployment, "look", looked)
    settings = LEARNING | {"rounds": 6, "evaluate_every": 2, "client_lr": "auto", "personal_steps": 0} | parts
    result = pf2lora.federate(**world.settings(**settings))
    (run,) = result.methods["pf2lora"].runs
    trained, served, common = torch.stack(seen, dim=1)
    assert trained.shape == (3, 3) and (trained > common).any()  # y did harm
    assert (served <= common).all()
    recorded = [record.validation_loss for record in run.rounds if record.validation_loss is not None]
    assert recorded == served.tolist()


def test_deploy_is_measured_for_every_method_alike(world: World) -> None:
    methods = ["pf2lora", "pf2lora-joint", "homlora", "per-fedavg", "hetlora", "centralized", "local"]
    result = pf2lora.federate(**world.settings(**VALIDATED), method=methods)
    assert result.point == "deploy"
    for name in methods:
        (run,) = result.methods[name].runs
        assert run.deploy is not None and set(run.deploy) == set(run.served) == {
            "accuracy",
            "matthews",
            "loss",
        }
        assert len(run.choices or []) == 3 and run.deployed_loss is not None
        assert run.candidates["served"] == run.served
        assert run.rounds[-1].validation_loss is not None
        scores = result.deploy(method=name)
        assert scores.mean == run.deploy["accuracy"].mean and set(scores.per_client) == {
            "north",
            "south",
            "west",
        }
    rows = result.table()
    rows = rows.to_dict("index") if hasattr(rows, "to_dict") else {row["method"]: row for row in rows}
    assert rows["local"]["deploy"] == result.deploy(method="local").mean
    assert rows["local"]["worst client"] == result.deploy(method="local").worst
    off = pf2lora.federate(**world.settings(method="homlora"))
    (run,) = off.methods["homlora"].runs
    assert (run.deploy, run.choices, run.candidates, run.deployed_loss) == (None, None, {}, None)
    assert off.deploy().mean is None and off.point == "served"
    assert all(record.validation_loss is None for record in run.rounds)


def test_validation_rows_are_neither_trained_nor_tested_on(world: World) -> None:
    """The same test rows with and without; what is to choose by comes out of the training rows."""
    without, with_them = (
        prepare(from_settings(world.settings(validation_ratio=ratio))).clients for ratio in (0, 0.2)
    )
    for a, b in zip(without, with_them):
        assert a.test == b.test and not a.validation and len(b.validation) == round(0.2 * len(a.train))
        assert sorted(map(str, b.train + b.validation)) == sorted(map(str, a.train))
