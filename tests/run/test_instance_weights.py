"""FedDPA's weight per input: by hand, and in `evaluate` and `predict`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from little_world import World, command_line, make_world, opened
from tiny_tasks import write_generation_task

import pf2lora
from pf2lora.data.loading import read_rows
from pf2lora.run import instance_weights
from pf2lora.run.saved import LoadedRun


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("world"))
    settings: dict[str, Any] = {"rounds": 4, "lr": 0.05, "method": ["feddpa-t", "feddpa-f", "homlora"]}
    pf2lora.federate(**world.settings(**settings, out=world.root / "run"))
    return world


def rows_of(run: LoadedRun, file: Path) -> list[Any]:
    return read_rows(run.config.task, file, run.saved.labels)


@pytest.mark.parametrize("method", ["feddpa-t", "feddpa-f"])
def test_each_input_has_its_own_mixture(method: str, world: World) -> None:
    """As if the run had been mixed with that input's weight, one input after the other."""
    run = opened(world.root / "run", method)
    rows = rows_of(run, world.clients[1])[:20]
    own = instance_weights.sampled(rows_of(run, world.clients[0]), run.saved.seed, "north")
    shares = instance_weights.own_shares(run, rows, own)
    found = run.answers("north", rows, rows_of(run, world.clients[0]))
    assert len(own) == 5 and len(found) == 20 and 0 <= shares.min() < shares.max() <= 1
    x, y = run.client("north")
    views, own_views = run.model.common_layout.unpack(x), run.model.personal_layout.unpack(y)
    for i in (0, 7, 19):
        alpha = 0.5 * float(shares[i])
        common = {n: t * (2 * (1 - alpha)) if n.endswith(".B") else t for n, t in views.items()}
        personal = {n: t * (2 * alpha) if n.endswith(".D") else t for n, t in own_views.items()}
        packed = run.model.common_layout.pack(common), run.model.personal_layout.pack(personal)
        encoded = run.task.encode([[rows[i]]], training=False)
        ((expected,),) = run.task.predict(run.model, *packed, encoded)
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-5)
    fixed = run.answers("north", rows)
    assert max(float(np.abs(a - b).max()) for a, b in zip(found, fixed)) > 1e-3


def test_what_is_as_the_clients_own_gets_the_weight_of_training(world: World) -> None:
    run = opened(world.root / "run", "feddpa-t")
    row = rows_of(run, world.clients[0])[0]
    assert float(instance_weights.own_shares(run, [row], [row] * 3)) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(
        run.answers("north", [row], [row])[0], run.answers("north", [row])[0], atol=1e-5
    )


def test_representations_are_the_frozen_models(world: World) -> None:
    """Without padding's influence, and whatever adapters were in place before."""
    run = opened(world.root / "run", "feddpa-t")
    rows = rows_of(run, world.clients[0])[:6]
    together = instance_weights.representations(run, rows)
    run.answers("north", rows)
    alone = torch.cat([instance_weights.representations(run, [row]) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_from_the_command_line(world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run, own = world.root / "run", ["--own-rows", world.clients[0]]
    args = ["evaluate", run, world.clients[0], "--client", "north", "--method", "feddpa-t", "--json"]
    fixed, weighed = (json.loads(command_line(monkeypatch, capsys, *args, *more)[1]) for more in ([], own))
    assert fixed["rows"] == weighed["rows"] and fixed["loss"] != weighed["loss"]
    args = [
        "predict",
        run,
        "the film was superb",
        "--client",
        "north",
        "--method",
        "feddpa-f",
        "--json",
        *own,
    ]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and 0 < json.loads(out)[0]["probability"] <= 1
    for method, client, said in (
        ("homlora", ["--client", "north"], "homlora mixes no adapters.*feddpa-t or feddpa-f"),
        ("feddpa-t", [], r"name the client \(--client\)"),
    ):
        code, _, err = command_line(
            monkeypatch, capsys, "predict", run, "a film", *client, "--method", method, *own
        )
        assert code == 2 and re.search(said, err)


@pytest.mark.usefixtures("no_java")
def test_generation_goes_by_the_prompts_last_token(tmp_path: Path) -> None:
    model, files = write_generation_task(tmp_path, ["north", "south"])
    settings: dict[str, Any] = {"rounds": 1, "steps": 2, "lr": 0.05, "batch_size": 2, "validation_ratio": 0}
    text: dict[str, Any] = {"max_length": 64, "max_new_tokens": 4, "beams": 1, "no_repeat_ngram": 0}
    pf2lora.federate(
        model=model, clients=files, task="generation", method="feddpa-t", out=tmp_path / "run", device="cpu",
        **settings, **text,
    )  # fmt: skip
    run = opened(tmp_path / "run")
    rows = rows_of(run, files[0])
    assert len(run.answers("north", rows[:3], rows)) == 3
    assert instance_weights.representations(run, rows[:3]).shape[0] == 3
