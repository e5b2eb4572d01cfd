"""Sizes of the client's own adapter by the rule as it is: tried after so many of a site's own steps, and no sooner."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from small_federation import (
    SITES,
    Small,
    local_run,
    make_plan,
    make_small,
    write_data,
    write_model,
    write_site_file,
)
from validated_federation import AUTO

from pf2lora.core.choice import Judge
from pf2lora.core.method import State
from pf2lora.data.client import Client
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run import workload

pytestmark = pytest.mark.usefixtures("one_thread")

RARE: dict[str, Any] = {
    "participation": 0.5,
    "rounds": 9,
    "steps": 12,
    "lr": 0.003,  # at 0.01 Adam makes of a rounding a difference of 4e-5 in so many steps, on some processors
    "personal_steps": 0,
    "hypergradient_mode": "none",
}


def test_a_site_tries_sizes_by_its_own_steps_as_a_local_client_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 to 15 validation rows in batches of 4 are asked every 20 to 25 steps; a site takes part in half of the rounds,
    of 12 steps each. It is started anew before each."""
    resize, tried = PF2LoRA.resize, [0]

    def counted(self: PF2LoRA, s: State, judge: Judge, *, serving: bool = False) -> State:
        tried[0] += 0 if serving else len(s.y)
        return resize(self, s, judge, serving=serving)

    monkeypatch.setattr(PF2LoRA, "resize", counted)
    plan = make_plan("pf2lora", config=AUTO | RARE | {"evaluate_every": 9})
    small = make_small(tmp_path, plan)
    small.greet()
    took_part, expected = dict.fromkeys(SITES, 0), 0
    while not small.coordinator.over:
        for site in small.round()["answered"]:
            rows = len(small.setups[site].trial.workload.clients[0].validation)
            between = PF2LoRA.steps_between(Fraction(rows, 4))
            done = 12 * took_part[site]
            expected += done // between > (done - 12) // between and done > 0
            took_part[site] += 1
        for site in SITES:
            small.sessions[site].folder.close()
            small.sessions[site] = small.start_site(site)
    assert tried == [expected] and expected >= len(SITES)
    state, common, _ = local_run(tmp_path, plan)
    assert tried == [2 * expected]
    assert small.coordinator.common is not None
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(SITES):
        own = small.sessions[site].folder.newest_before(99, small.setups[site].initial).state
        assert (own.y[0] - state.y[k]).abs().max() <= 1e-5 < own.y[0].abs().max()


@pytest.mark.usefixtures("sized_every_round")
def test_a_client_without_validation_rows_trains_as_a_site_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the fixed rate, beside a client that finds its own size, and it says so."""
    plan = make_plan("pf2lora", SITES[:2], config=AUTO | {"hypergradient_mode": "none", "personal_steps": 0})
    write_model(tmp_path / "model")
    write_data(tmp_path, SITES[:2])
    files = {
        site: write_site_file(tmp_path / "sites" / site / "site.toml", tmp_path, site) for site in plan.sites
    }
    lines = files["site-2"].read_text().splitlines()
    kept = [line for line in lines if not line.startswith("validation")]
    files["site-2"].write_text("\n".join([*kept, "validation_ratio = 0.0\n"]))
    small = Small(plan, tmp_path, files)
    said = [line for line in caplog.messages if "no validation rows" in line]
    assert len(said) == 1
    assert said[0].startswith(f"{files['site-2']}: ") and said[0].endswith("--client-lr auto is 0.03")
    small.run()
    original = workload.load_clients

    def all_but_one(*args: Any, **more: Any) -> list[Client[Any]]:
        first, second = original(*args, **more)
        return [first, replace(second, validation=[])]

    monkeypatch.setattr(workload, "load_clients", all_but_one)
    state, common, _ = local_run(tmp_path, plan)
    assert small.coordinator.common is not None
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(plan.sites):
        own = small.sessions[site].folder.newest_before(99, small.setups[site].initial).state
        assert (own.y[0] - state.y[k]).abs().max() <= 1e-5
