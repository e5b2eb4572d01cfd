"""Names: what a site may be called, and clients of a rehearsal that may be called anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_federation import (
    Small,
    local_outcome,
    local_run,
    make_plan,
    write_data,
    write_model,
    write_site_file,
)

from pf2lora.data.client import check_name as check_client_name
from pf2lora.errors import UserError
from pf2lora.federation.protocol.names import check_sites, is_site_name, site_names
from pf2lora.federation.protocol.site_setup import read_site_file
from pf2lora.run.config import merged

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("clients", "sites"),
    [
        (("site-1", "Site_2", "3"), ("site-1", "Site_2", "3")),
        (("Clinic A", "Klinik Süd"), ("clinic-a", "klinik-sud")),
        (
            ("Clinic A", "clinic-a", "Clinic-a.", "clinic  A"),
            ("clinic-a-2", "clinic-a", "clinic-a-3", "clinic-a-4"),
        ),
        (("a.b", "A", "a!", "-a-"), ("a-b", "A", "a-2", "a-3")),
        (("server", "authority", "Server!"), ("server-2", "authority-2", "server-3")),
        (("北京", "上海", "Straße 5"), ("site", "site-2", "strasse-5")),
        (("x" * 100, "x" * 101), ("x" * 56, "x" * 56 + "-2")),
    ],
)
def test_every_client_gets_a_site_name_of_its_own(clients: tuple[str, ...], sites: tuple[str, ...]) -> None:
    assert site_names(clients) == sites
    assert all(is_site_name(site) for site in sites)
    check_sites(sites)


def test_whatever_trains_locally_can_be_rehearsed() -> None:
    odd = ["a b", "ward [3]", "a.b", "-x-", "Ünïcode", "#", "(1)", "a" * 200, "é", "e", "server"]
    for name in odd:
        check_client_name(name, "test")
    sites = site_names(odd)
    check_sites(sites)
    assert len({site.lower() for site in sites}) == len(odd)


@pytest.mark.parametrize("method", ["pf2lora", "hetlora"])
def test_a_clients_own_name_makes_its_numbers(tmp_path: Path, method: str) -> None:
    """Batches, first adapters and folders go by the client's name, not by what it is called as a site."""
    clients = ("Clinic A", "Klinik Süd")
    write_model(tmp_path / "model")
    write_data(tmp_path, clients)
    plan = make_plan(method, site_names(clients))
    files = {
        site: write_site_file(tmp_path / "sites" / site / "site.toml", tmp_path, site, client=client)
        for site, client in zip(plan.sites, clients)
    }
    small = Small(plan, tmp_path, files)
    small.run()
    _, common, _ = local_run(tmp_path, plan)
    local, trial = local_outcome(tmp_path, plan)
    assert trial.workload.names == list(clients)
    assert small.coordinator.common is not None
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, (site, client) in enumerate(zip(plan.sites, clients)):
        kept = tmp_path / "state" / site / plan.name
        assert (kept / "clients" / client / "adapter_config.json").is_file()
        saved = load_file(kept / "state" / "clients" / f"{client}.safetensors")
        x = trial.model.common_layout.pack(
            {n.removeprefix("common."): t[None] for n, t in saved.items() if n.startswith("common.")}
        )
        torch.testing.assert_close(x[0], local.common_of_client[k], rtol=0, atol=1e-5)


def test_a_clients_name_must_serve_as_a_folders_name(tmp_path: Path) -> None:
    file = write_site_file(tmp_path / "site.toml", tmp_path, "site-1", client="a")
    assert read_site_file(file).name == "a"
    file.write_text(file.read_text().replace('name = "a"', 'name = "../a"'))
    with pytest.raises(UserError, match=r"'../a' cannot name a client"):
        read_site_file(file)


def test_two_sites_of_one_name_are_no_plan() -> None:
    with pytest.raises(UserError, match="two sites are called 'site-1'"):
        replace(make_plan(), sites=("site-1", "site-1"))


@pytest.mark.parametrize("setting", [{"method": ["json:loads"]}, {"task": "os:path"}])
def test_no_site_imports_a_module_because_a_plan_says_so(setting: dict[str, Any]) -> None:
    plan = make_plan("homlora")
    with pytest.raises(UserError, match="no site imports a module because a plan says so"):
        replace(
            plan,
            method=setting.get("method", [plan.method])[0],
            config=merged(plan.config, {"task": {"name": setting.get("task", "classification")}}),
        )
