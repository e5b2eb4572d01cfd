"""The synthetic experiment: the paper's data and start, and what truly comes out of one seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pf2lora.cli.reproduce import app
from pf2lora.errors import UserError
from pf2lora.reproduce.comparison import Curves, SeedRun, make_plans, run_method, run_seed
from pf2lora.reproduce.summary import summarize
from pf2lora.reproduce.synthetic import TRAINING, Settings, hetlora, make_problem, pf2lora
from pf2lora.reproduce.tuning import Tuning


@pytest.fixture(scope="module")
def run() -> SeedRun:
    return run_seed(0, Settings())


def curves_of(run: SeedRun, method: str, point: str, rates: str = "paper") -> Curves:
    curves = run.curves[method][rates][point]
    assert curves is not None, "the run diverged"
    return curves


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
    assert sum(learner.method.sent_numbers(learner.start, 1)) == 240
    assert learner.weights(learner.start.x, learner.start.y).abs().max() == 0


def test_pf2lora_finds_both_clients_truth_before_averaging(run: SeedRun) -> None:
    end = {m: rows[-1] for m, rows in curves_of(run, "pf2lora", "before_averaging").items()}
    assert end["rank"] == run.truth.rank_90
    assert all(d < 0.1 * n for d, n in zip(end["distance"], run.truth.norm))
    served = curves_of(run, "pf2lora", "served")["distance"][-1]
    assert all(before < after for before, after in zip(end["distance"], served))


def test_hetlora_prunes_client_1_below_its_true_rank_and_fails_there(run: SeedRun) -> None:
    curves = curves_of(run, "hetlora", "served")
    columns = torch.tensor(curves["columns"])
    assert columns[0].tolist() == [2, 10]
    assert (columns.diff(dim=0) <= 0).all()
    assert columns[-1, 0] == 1
    assert curves["distance"][-1][0] > 0.5 * run.truth.norm[0]
    assert len(curves["rank"]) == 201
    assert curves["rank"][0] == [0, 0]


def test_nobody_beats_the_reduced_rank_regression_in_training(run: SeedRun) -> None:
    for method in ("hetlora", "pf2lora"):
        best = torch.tensor(run.optimum[method].metrics["train_loss"])
        for point in ("served", "before_averaging"):
            assert (torch.tensor(curves_of(run, method, point)["train_loss"]) > best).all()


def test_no_pair_with_a_common_part_is_below_the_served_floor(run: SeedRun) -> None:
    whole = sum(norm**2 for norm in run.truth.norm) ** 0.5
    served = torch.tensor(curves_of(run, "pf2lora", "served")["distance"]).norm(dim=1) / whole
    assert (served > run.truth.served_floor).all()
    truth = make_problem(0).truth
    U, S, Vh = torch.linalg.svd(truth[0] - truth[1])
    own = (U[:, :4] * S[:4]) @ Vh[:4]
    common = (
        truth[0] + truth[1] - own
    ) / 2  # the best common part of any rank, beside own parts of rank 4 together
    reached = (torch.stack([common + own, common]) - truth).norm() / whole
    assert reached.item() == pytest.approx(run.truth.served_floor)


def test_quartiles_over_seeds(run: SeedRun) -> None:
    served = curves_of(run, "pf2lora", "served")
    moved = served | {"distance": [[value + 4 for value in row] for row in served["distance"]]}
    points = run.curves["pf2lora"]["paper"] | {"served": moved}
    other = replace(run, curves=run.curves | {"pf2lora": {"paper": points}})
    spread = summarize([run, other], Settings(), {}).curves["pf2lora"]["paper"]["served"]["distance"]
    start = served["distance"][0][0]
    found = [quartile[0][0] - start for quartile in (spread.q1, spread.median, spread.q3)]
    assert found == pytest.approx([1, 2, 3])


def test_a_run_is_a_function_of_its_seed() -> None:
    def distances(seed: int, **settings: Any) -> torch.Tensor:
        done = run_seed(seed, Settings(steps=20, **settings))
        return torch.tensor([curves_of(done, m, "served")["distance"] for m in ("hetlora", "pf2lora")])

    first = distances(1)
    torch.testing.assert_close(distances(1), first, rtol=1e-10, atol=0)
    for other in (distances(2), distances(1, upper="adamw")):
        assert not torch.isclose(other[:, -1], first[:, -1]).any()


def test_each_point_is_measured_with_the_rates_tuned_for_it() -> None:
    settings = Settings(steps=20)
    tuning = Tuning([1000], [], {"served": 1.0, "before_averaging": 3.0})
    done = run_seed(1, settings, make_plans(settings, {"pf2lora": tuning}))
    assert done.curves["pf2lora"]["tuned"]["served"] == done.curves["pf2lora"]["paper"]["served"]
    alone = run_method("pf2lora", 1, make_problem(1), Settings(steps=20, lr=0.015, client_lr=0.006))
    assert alone is not None
    before = curves_of(done, "pf2lora", "before_averaging", "tuned")["distance"]
    torch.testing.assert_close(torch.tensor(before), torch.tensor(alone["before_averaging"]["distance"]))


def test_a_seed_that_diverges_is_counted_and_ends_no_other() -> None:
    settings = Settings(steps=20)
    good = run_seed(1, settings)
    assert run_method("hetlora", 1, make_problem(1), settings.scaled("hetlora", 300)) is None
    gone = replace(
        good, curves=good.curves | {"hetlora": {"paper": dict.fromkeys(good.curves["hetlora"]["paper"])}}
    )
    both = summarize([good, gone], settings, {})
    end = both.final["hetlora"]["paper"]["served"]
    assert end.diverged == 1
    assert end.metrics == summarize([good], settings, {}).final["hetlora"]["paper"]["served"].metrics
    assert both.final["pf2lora"]["paper"]["served"].diverged == 0


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
    assert len({len(tuning["tries"]) for tuning in result["tuning"].values()}) == 1
    for method in ("hetlora", "pf2lora"):
        assert set(result["final"][method]) == {"paper", "tuned"}
    assert "served, paper" in done.output and "before, tuned" in done.output
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, UserError)
    assert "--force" in str(again.exception)
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0


def test_without_tuning_only_the_papers_rates_are_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["synthetic", "--no-tune", "--steps", "20", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "synthetic.json").read_text())
    assert result["tuning"] == {}
    assert list(result["final"]["hetlora"]) == ["paper"]
    assert "tuned" not in done.output
