"""What a result claims: by its test rows and its seeds, in pairs; a tie is a tie."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import numpy as np
import pytest
from little_world import FAST, World, make_world
from result_example import make_result, typed
from scipy import stats
from sklearn.metrics import matthews_corrcoef

import pf2lora
from pf2lora.core.resampling import TIMES, resampled_rows
from pf2lora.report.findings import conclusions
from pf2lora.run.differences import Uncertain, over_seeds_and_rows
from pf2lora.run.result import Result
from pf2lora.run.verdicts import best, client_differences, difference, uncertain
from pf2lora.tasks.classification.rows import TextRow
from pf2lora.tasks.classification.task import Classification


def test_the_error_is_that_of_a_share() -> None:
    """Of n answers, a share p is right: its standard error is √(p(1 − p)/n)."""
    right = np.array([True] * 150 + [False] * 50)
    means = right[resampled_rows("north", 200)].mean(1)
    assert means.std(ddof=1) == pytest.approx((0.75 * 0.25 / 200) ** 0.5, rel=0.15)
    assert over_seeds_and_rows([0.75], [means.tolist()]).error == pytest.approx(means.std(ddof=1))


def test_seeds_alone_give_students_interval() -> None:
    values = [0.80, 0.83, 0.85]
    found = over_seeds_and_rows(values, None)
    low, high = stats.t.interval(0.95, 2, statistics.fmean(values), stats.sem(values))
    assert found.margin == pytest.approx((high - low) / 2)


def test_both_accidents_add_up() -> None:
    rng = np.random.default_rng(0)
    rows = (0.8 + rng.normal(0, 0.03, TIMES)).tolist()
    seeds = [0.79, 0.80, 0.81]
    found = over_seeds_and_rows(seeds, [rows] * 3)
    assert found.error == pytest.approx((np.var(rows, ddof=1) + np.var(seeds, ddof=1) / 3) ** 0.5)
    assert 2 < found.freedom < TIMES + 2


def test_nothing_known_is_nothing_claimed() -> None:
    assert Uncertain(0.1, None).is_nought is None and over_seeds_and_rows([0.8], None).margin is None
    assert Uncertain(0.0, 0.0).is_nought is True


def of_rows(right: dict[str, list[list[bool]]]) -> Result:
    """One seed of each method, whose clients got these rows right."""
    content = make_result(clients=2, seeds=1)
    runs = content["methods"]
    plain = runs["pf2lora"]["runs"][0]
    content["methods"] = {}
    for method, clients in right.items():
        run: dict[str, Any] = copy.deepcopy(plain)
        resampled = [
            np.array(rows)[resampled_rows(str(k), len(rows))].mean(1) for k, rows in enumerate(clients)
        ]
        scores = [float(np.mean(rows)) for rows in clients]
        table = {"per_client": scores, "mean": float(np.mean(scores)), "worst": min(scores), "spread": 0.0}
        for point in ("served", "deploy"):
            run[point]["accuracy"] = table
        means = np.mean(resampled, axis=0).tolist()
        errors = [float(r.std(ddof=1)) for r in resampled]
        run["resampled"] = {p: {"per_client": errors, "means": means} for p in ("served", "deploy")}
        content["methods"][method] = {"label": method, "runs": [run], "failed": None}
    return typed(content)


def test_pairs_see_what_the_scores_alone_do_not() -> None:
    """80% and 75% on 200 rows each: alone they are within each other's intervals. If the one is right wherever the
    other is, five points are no accident; if they are right on different rows, they may be."""
    first = [True] * 160 + [False] * 40
    nested = [True] * 150 + [False] * 50
    apart = np.random.default_rng(0).permutation(nested).tolist()
    told = of_rows({"homlora": [first, first], "local": [nested, nested]})
    found = difference(told, "homlora", "local")
    assert found is not None and found.mean == pytest.approx(0.05) and found.is_nought is False
    assert best(told) == ["homlora"] and "homlora scores best" in conclusions(told)[0]
    assert "Federating beats training alone" in conclusions(told)[1]
    alone = [uncertain(told, m) for m in ("homlora", "local")]
    assert all(u is not None and u.margin is not None and u.margin > 0.025 for u in alone)

    open_ = of_rows({"homlora": [first, first], "local": [apart, apart]})
    found = difference(open_, "homlora", "local")
    assert found is not None and found.is_nought is True
    assert best(open_) == ["homlora", "local"] and "cannot be told apart" in conclusions(open_)[0]
    assert all(d is not None and d.is_nought for d in client_differences(open_, "homlora", "local"))


def test_a_tie_is_a_tie() -> None:
    rows = [[True] * 67 + [False] * 13] * 2
    result = of_rows({"homlora": rows, "local": rows})
    assert best(result) == ["homlora", "local"]
    assert difference(result, "homlora", "local") == Uncertain(0.0, 0.0)


@pytest.mark.parametrize("metric", ["accuracy", "matthews", "loss"])
def test_resampled_scores_are_the_scores_of_resampled_rows(metric: str, world: World) -> None:
    task = Classification(world_tokenizer(world), ["neg", "pos"], metric=metric)
    rng = np.random.default_rng(1)
    rows = [TextRow("a", ("neg", "pos")[int(b)]) for b in rng.integers(0, 2, 40)]
    logits = list(rng.normal(size=(40, 2)))
    draws = resampled_rows("north", 40)[:5]
    found = task.resampled(logits, rows, draws)
    for i, taken in enumerate(draws):
        wanted = task.score([logits[j] for j in taken], [rows[j] for j in taken])[metric]
        assert found is not None and found[i] == pytest.approx(wanted)
    gold = [row.label for row in rows]
    if metric == "matthews":
        assert task.score(logits, rows)[metric] == pytest.approx(
            matthews_corrcoef(gold, [task.labels[int(row.argmax())] for row in logits])
        )


def test_every_run_says_how_sure_it_is(world: World) -> None:
    result = pf2lora.federate(**world.settings(**FAST, method=["homlora", "pf2lora"], seeds=2))
    for method in result.methods.values():
        for run in method.runs:
            for point, found in run.resampled.items():
                scores = run.at(point)  # type: ignore[arg-type]
                assert scores is not None and len(found.means) == TIMES
                mean = scores["accuracy"].mean
                assert mean is not None and abs(np.mean(found.means) - mean) < 0.03
            assert {"served", "before_averaging"} <= set(run.resampled)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def world_tokenizer(world: World) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(world.root / "model")
