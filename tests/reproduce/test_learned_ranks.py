"""Learned ranks against the clients' data: the arithmetic by hand, and the command on finished results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from little_world import make_world
from result_example import make_result, typed
from typer.testing import CliRunner

from pf2lora import federate
from pf2lora.cli import app
from pf2lora.reproduce.ranks import (
    Point,
    correlations,
    label_distances,
    layer_ranks,
    mean_ranks,
    points,
    spearman,
    two_level,
)
from pf2lora.reproduce.ranks_page import markdown
from pf2lora.run.result import load_result


def test_rank_correlation_by_hand() -> None:
    assert mean_ranks(np.array([5.0, 1.0, 5.0, 9.0])).tolist() == [1.5, 0.0, 1.5, 3.0]
    assert spearman([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # 1 − 6·Σd²/(n(n²−1)) with d = (0, 1, −1, 0)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert spearman([1, 1, 1], [1, 2, 3]) is None and spearman([1, 2], [1, 2]) is None


def test_how_different_a_client_is() -> None:
    # the mean share of a is 1/2: the first client is 0.4 away in both labels, the second on the other side
    assert label_distances([{"a": 9, "b": 1}, {"a": 1, "b": 9}]) == pytest.approx([0.4, 0.4])
    assert label_distances([{"a": 5, "b": 5}, {"a": 50, "b": 50}]) == pytest.approx([0, 0])
    assert label_distances([{}, {}]) == [None, None]


def test_every_client_of_every_seed_is_a_point() -> None:
    result = typed(make_result())
    (method, *_) = two_level(result)
    found = points(result, method)
    runs = result.methods[method].runs
    assert len(found) == len(runs) * len(result.clients)
    last = next(r for r in reversed(runs[0].rounds) if r.ranks is not None)
    assert last.ranks is not None and found[0].rank == pytest.approx(np.mean(last.ranks[0]))
    rho = correlations(found)["rows"]
    own = [p for p in found if p.seed == found[0].seed]
    single = spearman([p.traits["rows"] for p in own], [p.rank for p in own])
    if len(runs) == 1 and single is not None:
        assert rho is not None and rho.mean == pytest.approx(single)


def test_how_hard_a_client_is_does_not_come_from_its_own_model() -> None:
    result = typed(make_result())
    ours = {p.client: p.traits["difficulty"] for p in points(result, "pf2lora")}
    assert ours == {p.client: p.traits["difficulty"] for p in points(result, "local")}
    pooled = [run.served["loss"].per_client for run in result.methods["centralized"].runs]
    assert list(ours.values()) == pytest.approx(np.mean(np.array(pooled, dtype=float), axis=0))
    del result.methods["centralized"]
    assert {p.client: p.traits["difficulty"] for p in points(result, "pf2lora")} != ours  # HOMLoRA's
    del result.methods["homlora"]
    bare = points(result, "pf2lora")
    assert all("difficulty" not in p.traits for p in bare)
    assert "has none of centralized and homlora" in markdown(bare, "pf2lora")


def test_on_tiny_data_the_page_has_every_client_and_layer_with_its_spread(
    tmp_path: Path, one_thread: None
) -> None:
    world = make_world(tmp_path)
    settings = world.settings(rounds=1, steps=1, seeds=2, out=tmp_path / "run")
    federate(**settings | {"method": ["pf2lora", "centralized"]})
    out = CliRunner().invoke(
        app, ["reproduce", "ranks", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    )
    assert out.exit_code == 0, out.output
    stored = json.loads((tmp_path / "out" / "ranks.json").read_text())
    result = load_result(tmp_path / "run" / "result.json")
    pooled = [run.served["loss"].per_client for run in result.methods["centralized"].runs]
    assert len(pooled) == 2 and len(stored["points"]) == 2 * len(result.clients)
    for k, client in enumerate(result.clients):
        own = [p for p in stored["points"] if p["client"] == client.name]
        assert [p["traits"]["difficulty"] for p in own] == pytest.approx(
            [np.mean([of[k] for of in pooled])] * 2
        )
    page = (tmp_path / "out" / "ranks.md").read_text(encoding="utf8")
    for layer in result.methods["pf2lora"].runs[0].layers:
        told = [line for line in page.splitlines() if line.startswith(f"| {layer} |")]
        assert len(told) == 2 and all(line.count(" ± ") >= 2 for line in told)
        assert told[1].count(" ± ") == len(result.clients)


def test_the_command_reads_finished_runs(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "result.json").write_text(json.dumps(make_result()))
    out = CliRunner().invoke(app, ["reproduce", "ranks", str(tmp_path), "--out", str(tmp_path / "out")])
    assert out.exit_code == 0, out.output
    assert "the rank against" in out.output
    figures = {f"{name}.{kind}" for name in ("ranks", "ranks-by-layer") for kind in ("png", "svg")}
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"ranks.md", "ranks.json", *figures}
    stored = json.loads((tmp_path / "out" / "ranks.json").read_text())
    again = [Point(**p) for p in stored["points"]]
    assert correlations(again) == correlations(points(typed(make_result()), stored["method"]))
    assert [layer["layer"] for layer in stored["layers"]] == list(again[0].layers)
    for layer in stored["layers"]:
        mean, apart = (f"{layer[of]['mean']:.2f} ± {layer[of]['deviation']:.2f}" for of in ("mean", "range"))
        assert f"| {layer['layer']} | {mean} | {apart} |" in out.output


def test_a_layer_whose_rank_follows_is_told_from_one_whose_rank_does_not() -> None:
    traits = [{"difference": d} for d in (0.1, 0.2, 0.3, 0.4)]
    layers = list(zip((1, 2, 3, 4), (7, 7, 7, 7), (6, 5, 3, 1)))  # follows, does not vary, runs against
    found = [
        Point("run", seed, f"c{k}", trait, 0.0, dict(zip("abc", ranks)))
        for seed in (0, 1)
        for k, (trait, ranks) in enumerate(zip(traits, layers))
    ]
    a, b, c = layer_ranks(found)
    assert a.rho["difference"] is not None and a.rho["difference"].mean == pytest.approx(1)
    assert b.rho["difference"] is None and (b.mean.mean, b.range.mean, b.mean.deviation) == (7, 0, 0)
    assert c.rho["difference"] is not None and c.rho["difference"].mean == pytest.approx(-1)
    assert (c.mean.mean, c.range.mean) == (3.75, 5) and a.rho["rows"] is None
