"""The synthetic experiment: the paper's data and start, and what truly comes out of one seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pf2lora.cli.reproduce import app
from pf2lora.errors import UserError
from pf2lora.reproduce.synthetic import (
    TRAINING,
    Settings,
    aggregate,
    hetlora,
    make_problem,
    pf2lora,
    run_seed,
)


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return run_seed(0, Settings())


def test_the_data_are_the_papers() -> None:
    problem = make_problem(3)
    assert torch.linalg.matrix_rank(problem.truth).tolist() == [3, 4]
    assert problem.inputs.shape == problem.targets.shape == (2, 1000, 10)
    noise = problem.targets - problem.inputs @ problem.truth
    torch.testing.assert_close(
        noise.var(dim=(1, 2)), torch.tensor([0.1, 0.2], dtype=torch.float64), rtol=0.05, atol=0
    )
    as_deviation = make_problem(3, "deviation")
    assert torch.equal(as_deviation.inputs, problem.inputs)
    deviation = (as_deviation.targets - problem.inputs @ problem.truth).std(dim=(1, 2))
    torch.testing.assert_close(deviation, torch.tensor([0.1, 0.2], dtype=torch.float64), rtol=0.05, atol=0)
    batch = problem.draw([1], [7])
    assert torch.equal(batch.tensors["inputs"], problem.inputs[1, :TRAINING])


def test_pf2lora_starts_with_orthogonal_products_of_full_rank() -> None:
    learner = pf2lora(0, Settings())
    common = learner.method.layout.unpack(learner.start.x)
    own = learner.layout_y.unpack(learner.start.y)
    assert torch.equal(common["W.A"][0], common["W.A"][1])
    assert not torch.allclose(own["W.C"][0], own["W.C"][1])
    assert (common["W.A"] @ own["W.C"].mT).abs().max() < 1e-12
    assert (common["W.B"].mT @ own["W.D"]).abs().max() < 1e-12
    W = learner.weights(learner.start.x, learner.start.y)
    assert torch.linalg.matrix_rank(W).tolist() == [6, 6]
    assert learner.start.x.shape[1] + learner.start.y.shape[1] == 120  # 240 parameters for two clients


def test_hetlora_starts_at_zero_with_the_papers_ranks() -> None:
    learner = hetlora(0, Settings())
    assert learner.start.opt.rank.tolist() == [2, 10]
    assert sum(learner.method.sent_numbers(learner.start)) == 240
    assert learner.weights(learner.start.x, learner.start.y).abs().max() == 0


def test_pf2lora_finds_both_clients_truth_before_averaging(run: dict[str, Any]) -> None:
    end = {m: rows[-1] for m, rows in run["curves"]["pf2lora"]["before_averaging"].items()}
    assert end["rank"] == run["truth"]["rank_90"]
    assert all(d < 0.1 * n for d, n in zip(end["distance"], run["truth"]["norm"]))
    served = run["curves"]["pf2lora"]["served"]["distance"][-1]
    assert all(before < after for before, after in zip(end["distance"], served))


def test_hetlora_prunes_client_1_below_its_true_rank_and_fails_there(run: dict[str, Any]) -> None:
    curves = run["curves"]["hetlora"]["served"]
    columns = torch.tensor(curves["columns"])
    assert columns[0].tolist() == [2, 10]
    assert (columns.diff(dim=0) <= 0).all()
    assert columns[-1, 0] == 1
    assert curves["distance"][-1][0] > 0.5 * run["truth"]["norm"][0]
    assert len(curves["rank"]) == 201
    assert curves["rank"][0] == [0, 0]


def test_nobody_beats_the_reduced_rank_regression_in_training(run: dict[str, Any]) -> None:
    for method in ("hetlora", "pf2lora"):
        best = torch.tensor(run["optimum"][method]["train_loss"])
        for curves in run["curves"][method].values():
            assert (torch.tensor(curves["train_loss"]) > best).all()


def test_quartiles_over_seeds(run: dict[str, Any]) -> None:
    other = json.loads(json.dumps(run))
    for row in other["curves"]["pf2lora"]["served"]["distance"]:
        row[:] = [value + 4 for value in row]
    result = aggregate([run, other], Settings())
    start = run["curves"]["pf2lora"]["served"]["distance"][0][0]
    spread = result["curves"]["pf2lora"]["served"]["distance"]
    found = [spread[q][0][0] - start for q in ("q1", "median", "q3")]
    assert found == pytest.approx([1, 2, 3])


def test_a_run_is_a_function_of_its_seed() -> None:
    def distances(seed: int, **settings: Any) -> torch.Tensor:
        curves = run_seed(seed, Settings(steps=20, **settings))["curves"]
        return torch.tensor([curves[m]["served"]["distance"] for m in ("hetlora", "pf2lora")])

    first = distances(1)
    torch.testing.assert_close(distances(1), first, rtol=1e-10, atol=0)
    for other in (distances(2), distances(1, upper="adamw")):
        assert not torch.isclose(other[:, -1], first[:, -1]).any()


@pytest.mark.parametrize("bad", [{"upper": "adam"}, {"noise": "none"}, {"steps": 15}])
def test_bad_settings_are_one_line(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        Settings(**bad)
    assert "\n" not in str(error.value)


def test_the_command_writes_json_and_pictures_and_overwrites_nothing(tmp_path: Path) -> None:
    command = ["synthetic", "--steps", "20", "--seeds", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "synthetic.json",
        "synthetic.svg",
        "synthetic.png",
    }
    result = json.loads((tmp_path / "out" / "synthetic.json").read_text())
    assert result["steps"] == [0, 10, 20]
    assert result["seeds"] == [0, 1]
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, UserError)
    assert "--force" in str(again.exception)
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0
