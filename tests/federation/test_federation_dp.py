"""Differential privacy across machines: the local engine's numbers, less in each message, and a site's own limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import SITES, Small, changed, in_time, local_run, local_trial, make_plan, make_small
from torch import Tensor

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages, private
from pf2lora.federation.protocol.allow_list import AllowList
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.outcome import collect
from pf2lora.federation.protocol.policy import PolicyBroken
from pf2lora.federation.protocol.problems import problem_code
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.site_setup import build
from pf2lora.federation.protocol.wire import Wire
from pf2lora.methods import METHODS
from pf2lora.run.privacy import epsilon

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'pf2lora[privacy]')")
pytestmark = pytest.mark.usefixtures("one_thread")

PRIVATE: dict[str, Any] = {"dp_noise": 0.5, "dp_clip": 0.05, "dp_noise_seed": 3}
FEDERATED = [name for name, kind in METHODS.items() if kind.federated and not kind.pooled]
REFUSED = ("hetlora", "scaffold", "fedex-lora", "flexlora")  # more than an average of x leaves or is made


def whole(small: Small) -> Tensor:
    """The server's last answer as the method means it."""
    setup = small.setups[SITES[0]]
    assert small.coordinator.common is not None
    return private.absolute(setup.method, setup.initial, small.coordinator.common, small.coordinator.done)


@pytest.mark.parametrize("method", [pytest.param(m, marks=in_time(m)) for m in FEDERATED])
def test_every_method_gives_the_local_engines_numbers_or_is_refused(tmp_path: Path, method: str) -> None:
    plan = make_plan(method, config=PRIVATE | {"rounds": 3, "participation": 0.75})
    if method in REFUSED:
        with pytest.raises(UserError, match=f"{method} has no differential privacy"):
            make_small(tmp_path, plan)
        return
    small = make_small(tmp_path, plan)
    small.run()
    _, common, _ = local_run(tmp_path, plan)
    assert common.norm() > 0.01
    assert (whole(small) - common).abs().max() <= 1e-5


def test_bfloat16_on_the_wire_is_cut_again_by_the_server(tmp_path: Path) -> None:
    plan = make_plan("homlora", wire="bfloat16", config=PRIVATE | {"dp_noise": 1e-9, "rounds": 1})
    small = make_small(tmp_path, plan)
    small.greet()
    small.tamper = enlarged
    small.round()
    assert small.coordinator.common is not None
    assert float(small.coordinator.common.double().norm()) <= 0.05 * (1 + 1e-6)


def enlarged(site: str, data: bytes) -> bytes:
    """An update that does not keep to the clip."""
    fields, tensors = messages.decode(data)
    return messages.encode(fields, {name: 100 * t for name, t in tensors.items()})


def test_who_does_not_answer_counts_as_zero(tmp_path: Path) -> None:
    """One of four is away: three quarters of what its sum of three would be, and the noise as before."""
    quiet = PRIVATE | {"dp_noise": 1e-9, "rounds": 1}
    commons = []
    for name, there in (("all", list(SITES)), ("three", list(SITES[:3])), ("one", [SITES[3]])):
        small = make_small(tmp_path / name, make_plan("homlora", config=quiet, quorum=0.25))
        small.greet()
        small.round(there)
        assert small.coordinator.common is not None
        commons.append(small.coordinator.common.double())
    torch.testing.assert_close(commons[1] + commons[2], commons[0], rtol=0, atol=1e-7)


def test_only_the_update_and_its_steps_leave(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", config=PRIVATE | {"evaluate_every": 1})
    small = make_small(tmp_path, plan)
    small.run()
    seen = {}
    for _, data in small.messages:
        fields, tensors = messages.decode(data)
        seen[fields["kind"]] = set(fields) - {"kind", "round"}
        total = sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5
        assert total <= 0.05 * (1 + 1e-5)
    assert seen.pop("hello") == {"model", "labels", "label_count", "layout", "engine", "version"}
    assert seen == {"update": {"steps"}, "scores": set()}
    kept = json.loads(
        (tmp_path / "state" / SITES[0] / "trial" / "clients" / SITES[0] / "scores.json").read_text()
    )
    assert kept["served"]["rows"] == 20 and "deploy" in kept


@pytest.mark.parametrize(
    "fields",
    [{"loss": 1.0}, {"second_order": 0.1}, {"served": {"rows": 1}}, {"validation": {"rows": 1, "loss": 1.0}}],
)
def test_the_allow_list_holds_back_what_rows_were_measured_for(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    small = make_small(tmp_path, make_plan("homlora", config=PRIVATE))
    method = small.setups[SITES[0]].method
    update = messages.encode({"kind": "update", "round": 1, "steps": 2} | fields)
    AllowList(method, None, Wire()).check(
        messages.encode({"kind": "update", "round": 1, "steps": 2, "loss": 1.0})
    )
    with pytest.raises(Malformed, match="not declared"):
        AllowList(method, None, Wire(private=True)).check(update)


def test_a_server_that_is_started_again_goes_on_with_the_same_noise_for_its_seed(tmp_path: Path) -> None:
    plan = make_plan("homlora", config=PRIVATE)
    small = make_small(tmp_path, plan)
    small.greet()
    small.round()
    first = small.coordinator.common
    small.start_server()
    assert first is not None and small.coordinator.common is not None
    assert torch.equal(small.coordinator.common, first)  # saved before anybody got it, and not drawn again
    while not small.coordinator.over:
        small.round()
    _, common, _ = local_run(tmp_path, plan)
    assert (whole(small) - common).abs().max() <= 1e-5


def test_an_epsilon_is_for_a_number_of_rounds(tmp_path: Path) -> None:
    plan = make_plan("homlora", config={"dp_epsilon": 4.0, "dp_clip": 0.1})
    ServerSession(plan, tmp_path)
    with pytest.raises(UserError, match="exists with another config"):
        ServerSession(changed(plan, rounds=9), tmp_path)
    longer = make_plan("homlora", config={"dp_noise": 2.0, "dp_clip": 0.1})
    ServerSession(longer, tmp_path / "noise")
    ServerSession(changed(longer, rounds=9), tmp_path / "noise")  # costs more, and says so


def test_a_rehearsals_result_has_epsilon_and_the_scores_that_sites_kept(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", config={"dp_noise": 2.0, "dp_clip": 0.05, "rounds": 2})
    small = make_small(tmp_path, plan)
    small.run()
    trial = local_trial(tmp_path, plan)
    trial.model.remove()
    states = [tmp_path / "state" / site for site in SITES]
    result = collect(plan, trial.workload, tmp_path / "server", tmp_path / "out", states)
    (run,) = result.methods["pf2lora"].runs
    assert run.privacy is not None and run.privacy.epsilon == epsilon(2.0, 1e-5, 2)
    assert run.served["accuracy"].mean is not None and run.deploy is not None
    assert "ε = " in (tmp_path / "out" / "report.html").read_text(encoding="utf8")


@pytest.mark.parametrize(
    ("config", "limit", "takes_part"),
    [
        ({"dp_epsilon": 4.0}, 4.0, True),
        ({"dp_epsilon": 4.0}, 3.9, False),
        ({"dp_epsilon": 4.0, "dp_noise_seed": 1}, 100.0, False),
        ({}, 100.0, False),
    ],
)
def test_a_site_stays_out_of_what_costs_it_more_than_it_allows(
    tmp_path: Path, config: dict[str, Any], limit: float, takes_part: bool
) -> None:
    small = make_small(tmp_path, make_plan("homlora", config=config))
    file = small.files[SITES[0]]
    file.with_name("policy.toml").write_text(f"max_epsilon = {limit}\n")
    if takes_part:
        build(small.plan, file, SITES[0])
        return
    with pytest.raises(
        PolicyBroken, match=f"its policy's max_epsilon is {limit:g}, and the run has"
    ) as refused:
        build(small.plan, file, SITES[0])
    assert problem_code(refused.value) == "policy"


def test_what_is_refused_locally_is_refused_by_server_and_site(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hetlora has no differential privacy"):
        ServerSession(make_plan("hetlora", config=PRIVATE), tmp_path / "server")
    with pytest.raises(UserError, match="it must be 'uniform'"):
        make_small(tmp_path, make_plan("homlora", config=PRIVATE | {"weighting": "size"}))
