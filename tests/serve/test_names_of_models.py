"""Clients that are called as the server calls models of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from serving import serving, write_generation_run

from pf2lora.cli.serve import introduced
from pf2lora.run.saved import LoadedRun, load_run
from pf2lora.serve.access import read_tokens
from pf2lora.serve.models import served_models
from pf2lora.serve.service import Limits, Service

TOKENS = {name: name[0] * 20 for name in ("common", "north")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_generation_run(tmp_path_factory.mktemp("run"), ("north", "common", "base"))


def test_a_client_keeps_its_name_and_its_model(run: Path, tmp_path: Path) -> None:
    """Everybody's token opens the common and the base model of the run; a client's own opens for nobody else."""
    service = Service(load_run(run, device="cpu"), Limits())
    assert list(service.adapters) == [":common", "north", "common", "base", ":base"]
    assert introduced(service)[1:3] == [
        "common is a client's; the common model of the run is :common",
        "base is a client's; the base model of the run is :base",
    ]
    file = tmp_path / "tokens.toml"
    file.write_text("".join(f'[{name}]\ntoken = "{token}"\n' for name, token in TOKENS.items()))
    access = read_tokens(file, list(service.adapters), service.for_all)
    with serving(run, access) as served:
        north, common = (served.client(TOKENS[name]) for name in ("north", "common"))
        assert [model.id for model in north.models.list()] == [":common", "north", ":base"]
        assert [model.id for model in common.models.list()] == [":common", "common", ":base"]
        assert north.models.retrieve(":base").id == ":base"
        asked: Any = {"prompt": "soup", "max_tokens": 9, "temperature": 0}
        texts = [common.completions.create(model=m, **asked).choices[0].text for m in (":common", "common")]
        assert texts[0] != texts[1]
        for name in ("common", "base"):
            with pytest.raises(openai.NotFoundError):
                north.completions.create(model=name, prompt="soup")


def test_who_joins_as_common_is_not_everybodys_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all clients share one model, that of a newcomer is its own all the same."""
    loaded = load_run(run, device="cpu")
    loaded = replace(loaded, saved=replace(loaded.saved, shares_one_model=True))
    monkeypatch.setattr(LoadedRun, "joined_later", lambda self, name: name == "common")
    found = served_models(loaded)
    assert found["north"] is found["base"] is found[":common"]
    assert not torch.equal(found["common"][1], found["north"][1])
