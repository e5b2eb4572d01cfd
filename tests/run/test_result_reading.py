"""Reading result.json: what is refused, and figures over seeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from result_example import make_result, small, write
from result_extras import with_classes, with_newcomers

from pf2lora.errors import UserError
from pf2lora.run.estimates import Estimate, estimate, within_spread
from pf2lora.run.result import load_result


def test_load_gives_what_was_written_from_the_folder_or_the_file(tmp_path: Path) -> None:
    full = make_result(task="generation")
    folder = write(tmp_path, full)
    assert load_result(folder).to_dict() == full
    assert load_result(folder / "result.json").to_dict() == full


def test_a_result_of_an_earlier_version_has_less(tmp_path: Path) -> None:
    older = make_result()
    for key in ("newcomers", "baselines", "labels"):
        del older[key]
    for method in older["methods"].values():
        for run in method["runs"]:
            del run["confusion"]
    found = load_result(write(tmp_path, older))
    assert (found.newcomers, found.baselines, found.labels) == ([], {}, [])
    assert found.methods["pf2lora"].runs[0].confusion is None


def test_baselines_and_answers_by_label_are_checked(tmp_path: Path) -> None:
    for change, place in (
        (
            lambda r: r["methods"]["local"]["runs"][0]["confusion"].pop(),
            "confusion must be a list of 2, not of 1",
        ),
        (
            lambda r: r["methods"]["local"]["runs"][0]["confusion"][1].pop(),
            "confusion[1] must be a list of 2",
        ),
        (lambda r: r["labels"].append("third"), "confusion[0] must be a list of 3, not of 2"),
        (
            lambda r: r["baselines"]["trivial"]["scores"]["accuracy"]["per_client"].pop(),
            "baselines.trivial.scores.accuracy.per_client must be a list of 2, not of 1",
        ),
    ):
        result = with_classes(small(local=[0.5]))
        change(result)
        with pytest.raises(UserError) as caught:
            load_result(write(tmp_path, result))
        assert place in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"method": "fedsgd"}, "newcomers[0].method must be one of pf2lora"),
        ({"deploy": {"loss": 0.1}}, "newcomers[0].deploy.accuracy is missing"),
        (
            {"method": "homlora", "client": {"name": "branch-office"}},
            "newcomers[1].client.name must be a new one",
        ),
        ({"client": {"name": "clinic-a"}}, "newcomers[0].client.name must be a new one, not 'clinic-a'"),
    ],
)
def test_newcomers_are_checked(tmp_path: Path, change: dict[str, Any], place: str) -> None:
    result = with_newcomers(make_result(seeds=1, rounds=2))
    first = result["newcomers"][0]
    first |= change | {"client": first["client"] | change.get("client", {})}
    with pytest.raises(UserError) as caught:
        load_result(write(tmp_path, result))
    assert place in str(caught.value)


def test_load_reads_figures_that_are_not_finite_as_unknown(tmp_path: Path) -> None:
    result = small(local=[0.5])
    result["methods"]["local"]["runs"][0]["rounds"][0]["train_loss"] = [math.nan, math.inf]
    loaded = load_result(write(tmp_path, result))
    assert loaded.methods["local"].runs[0].rounds[0].train_loss == [None, None]


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("format", 2, "format 2 is unknown"),
        (
            "methods.local.runs.0.deploy",
            {"accuracy": {"per_client": [0.5]}},
            "deploy.accuracy.mean is missing",
        ),
        ("methods.local.runs.0.choices", [], "choices must be a list of 2, not of 0"),
        ("methods.local.runs.0.choices", [1, 2], "choices[0] must be an object"),
        (
            "methods.local.runs.0.candidates",
            {"served": {"loss": {"per_client": [1], "mean": 1, "worst": 1, "spread": 0}}},
            "candidates.served.loss.per_client must be a list of 2, not of 1",
        ),
        (
            "methods.local.runs.0.rounds.1.validation_loss",
            [1],
            "rounds[1].validation_loss must be a list of 2",
        ),
        ("metric", "f1", "metric must be one of accuracy, matthews, loss"),
        ("clients", [], "clients must have at least one entry"),
        ("methods", {}, "methods must have at least one entry"),
        ("methods.local.runs", [], "methods.local.runs must have at least one entry"),
        ("methods.local.runs.0.seed", True, "methods.local.runs[0].seed must be a whole number"),
        (
            "methods.local.runs.0.served.accuracy.per_client",
            [0.5],
            "per_client must be a list of 2, not of 1",
        ),
        ("methods.local.runs.0.served", None, "methods.local.runs[0].served must be an object"),
        (
            "methods.local.runs.0.rounds.1.train_loss",
            ["x", 1],
            'rounds[1].train_loss[0] must be a number, not "x"',
        ),
        ("methods.local.runs.0.rounds.1.ranks", [[1]], "rounds[1].ranks must be a list of 2, not of 1"),
        ("methods.local.runs.0.rounds.1.ranks", [[1], [1]], "ranks[0] must be a list of 2, not of 1"),
        ("examples", [{"client": "a", "prompt": 1}], "examples[0].prompt must be a text"),
        ("newcomers", [{"method": "local"}], "newcomers[0].client is missing"),
    ],
)
def test_check_names_the_place(tmp_path: Path, path: str, value: Any, place: str) -> None:
    result = small(local=[0.5])
    node: Any = result
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        node = node[part]
    node[last] = value
    with pytest.raises(UserError) as caught:
        load_result(write(tmp_path, result))
    assert place in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_load_says_what_is_wrong_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        load_result(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no result\.json here"):
        load_result(tmp_path)
    with pytest.raises(UserError, match="line 2, column 1"):
        load_result(write(tmp_path / "broken", '{"format": 3,\n'))
    with pytest.raises(UserError, match="must be an object"):
        load_result(write(tmp_path / "list", "[]"))
    missing = small(local=[0.5])
    del missing["methods"]["local"]["runs"][0]["seconds"]
    with pytest.raises(UserError, match=r"methods\.local\.runs\[0\]\.seconds is missing"):
        load_result(write(tmp_path / "missing", missing))


def test_estimates_are_mean_and_sample_deviation() -> None:
    assert estimate([1.0, 3.0]) == Estimate(2.0, math.sqrt(2), 2)
    assert estimate([1.0]) == Estimate(1.0, None, 1)
    assert estimate([None, math.nan]) is None
    assert estimate([1.0, None]) is None  # a seed without a score does not drop out of the mean
    assert estimate([1.0, math.nan]) is None


def test_a_difference_is_within_the_spread_up_to_the_combined_deviation() -> None:
    def at(mean: float, deviation: float | None = 0.3) -> Estimate:
        return Estimate(mean, deviation, 3)

    assert within_spread(at(1.0), at(1.5, 0.4)) is True  # √(0.3² + 0.4²) = 0.5
    assert within_spread(at(1.0), at(1.51, 0.4)) is False
    assert within_spread(at(1.0), at(1.0, None)) is None
