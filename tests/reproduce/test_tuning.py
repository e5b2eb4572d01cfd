"""Tuning the synthetic experiment: the same care for every method, and no look at what is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pf2lora.cli.reproduce import app
from pf2lora.core.ranks import ninety_percent_rank
from pf2lora.errors import UserError
from pf2lora.reproduce import tuning
from pf2lora.reproduce.comparison import make_plans, run_method
from pf2lora.reproduce.synthetic import METHODS, TRAINING, Problem, Settings, make_problem, validation_rows
from pf2lora.reproduce.tuning import FACTORS, TUNING_SEEDS, Tuning, tune, tune_all

SHORT = Settings(steps=20)


def test_tuned_hetlora_is_near_the_optimum_before_averaging_where_its_rank_suffices() -> None:
    found = tune("hetlora", Settings(), factors=(1.0, 10.0, 300.0), seeds=TUNING_SEEDS[:1])
    assert found.tries[2].validation_loss is None  # diverged: a failed try, and no end of the others
    problem = make_problem(1)
    plans = make_plans(Settings(), {"hetlora": found})["hetlora"]

    def ending(rates: str) -> tuple[float, float]:
        """Client 2's relative distance and rank."""
        curves = run_method("hetlora", 1, problem, plans[rates]["before_averaging"])
        assert curves is not None
        end = curves["before_averaging"]
        return end["distance"][-1][1] / problem.truth[1].norm().item(), end["rank"][-1][1]

    assert ending("paper")[0] > 0.2
    distance, rank = ending("tuned")
    assert distance < 0.03
    assert rank == ninety_percent_rank(torch.linalg.svdvals(problem.truth[1])).item()


def test_every_method_gets_the_same_tries() -> None:
    tunings = tune_all(SHORT)
    assert set(tunings) == set(METHODS)
    for method, found in tunings.items():
        assert [t.factor for t in found.tries] == list(FACTORS)
        assert found.seeds == list(TUNING_SEEDS)
        for t in found.tries:
            paper = SHORT.rates(method)
            assert t.rates == pytest.approx({name: t.factor * rate for name, rate in paper.items()})
    assert 1.0 in FACTORS  # so tuning never chooses what validation finds worse than the paper's rates


def test_the_choice_has_the_lowest_validation_loss_at_its_point() -> None:
    found = tune("pf2lora", SHORT)
    for point, factor in found.chosen.items():
        losses = {t.factor: t.validation_loss[point] for t in found.tries if t.validation_loss is not None}
        assert losses[factor] == min(losses.values())
        assert len(losses) < len(FACTORS)


def test_the_tuning_sees_no_reported_problem_and_no_test_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def without_test_rows(seed: int, noise: str) -> Problem:
        seeds.append(seed)
        problem = make_problem(seed, noise)
        problem.inputs[:, TRAINING:] = problem.targets[:, TRAINING:] = torch.nan
        return problem

    def outcome(found: Tuning) -> list[float | None]:
        return [t.validation_loss["served"] if t.validation_loss else None for t in found.tries]

    seen = tune("hetlora", SHORT)
    monkeypatch.setattr(tuning, "make_problem", without_test_rows)
    assert outcome(tune("hetlora", SHORT)) == pytest.approx(outcome(seen))
    assert set(seeds) == set(TUNING_SEEDS)


def test_validation_rows_are_the_same_regression_with_rows_of_their_own() -> None:
    problem = make_problem(1000)
    inputs, targets = validation_rows(1000, problem.truth, "variance")
    assert inputs.shape == targets.shape == (2, 300, 10)
    for k in range(2):
        assert torch.cdist(inputs[k], problem.inputs[k]).min() > 0.01
    noise = (targets - inputs @ problem.truth).var(dim=(1, 2))
    torch.testing.assert_close(noise, torch.tensor([0.1, 0.2], dtype=torch.float64), rtol=0.1, atol=0)


def test_a_seed_that_tunes_is_not_reported(tmp_path: Path) -> None:
    command = ["synthetic", "--steps", "20", "--seed", str(TUNING_SEEDS[0] - 1), "--seeds", "2"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "--no-tune" in str(done.exception)
    assert CliRunner().invoke(app, [*command, "--no-tune", "--out", str(tmp_path)]).exit_code == 0


def test_when_every_try_fails_it_is_one_line() -> None:
    with pytest.raises(UserError) as error:
        tune("hetlora", SHORT, factors=(300.0,))
    assert "\n" not in str(error.value)
