"""A client's name never leads out of its run folder, wherever it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pf2lora.data.client import records_per_client
from pf2lora.data.loading import load_clients
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError
from pf2lora.federation.protocol.names import check_sites
from pf2lora.federation.protocol.site_setup import read_site_file
from pf2lora.run.saved import read_description
from pf2lora.tasks.classification.settings import ClassificationSettings

OUTSIDE = ("../evil", "/etc/evil", "a\\..\\b", "..", "nul", "x" * 300)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path


@pytest.mark.parametrize("name", OUTSIDE)
def test_in_a_column(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "a", "label": "b", "who": name}])
    with pytest.raises(UserError, match=r"line 1: .* cannot name a client"):
        records_per_client([file], "who")


@pytest.mark.parametrize("name", OUTSIDE)
def test_in_groups_and_values_that_become_clients(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"t{i}", "label": "ab"[i % 2], "who": name} for i in range(8)]
    file = str(write(tmp_path / "a.jsonl", rows))
    task = ClassificationSettings()
    for data in (
        DataSettings(clients=(file,), partition="column", partition_column="who"),
        DataSettings(clients=(file,), partition="groups", partition_column="who", groups=(f"{name}={name}",)),
    ):
        with pytest.raises(UserError, match="cannot name a client"):
            load_clients(task, data, 0)


@pytest.mark.parametrize("stem", ["con", "x" * 202, "a\x1b[31m", "a.", "trailing "])
def test_of_a_file(tmp_path: Path, stem: str) -> None:
    file = write(tmp_path / f"{stem}.jsonl", [{"text": "a", "label": "b"}])
    with pytest.raises(UserError, match="cannot name a client"):
        records_per_client([file], None)


@pytest.mark.parametrize(
    "pair", [("north", "North"), ("Stra\u00dfe", "STRASSE"), ("caf\u00e9", "cafe\u0301")]
)
def test_two_that_some_systems_take_for_one(tmp_path: Path, pair: tuple[str, str]) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [{"text": "a", "label": "b"}]) for name in pair]
    with pytest.raises(UserError, match="would share a folder"):
        records_per_client(files, None)
    rows = write(tmp_path / "all.jsonl", [{"text": "a", "label": "b", "who": name} for name in pair])
    with pytest.raises(UserError, match="would share a folder"):
        records_per_client([rows], "who")


@pytest.mark.parametrize("name", OUTSIDE)
def test_in_a_saved_run(tmp_path: Path, name: str) -> None:
    saved = {"method": "local", "seed": 0, "task": "classification", "labels": ["a", "b"], "clients": [name]}
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "run.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="cannot name a client"):
        read_description(tmp_path)


@pytest.mark.parametrize("name", OUTSIDE)
def test_of_a_site(tmp_path: Path, name: str) -> None:
    if name != "nul":
        with pytest.raises(UserError, match="site name"):
            check_sites([name])
    file = tmp_path / "site.toml"
    file.write_text(f'name = {json.dumps(name)}\nmodel = "m"\n[data]\nclients = ["a.jsonl"]\n')
    with pytest.raises(UserError, match="cannot name a client"):
        read_site_file(file)


def test_two_sites_that_some_systems_take_for_one() -> None:
    with pytest.raises(UserError, match="two sites"):
        check_sites(["Site-1", "site-1"])
