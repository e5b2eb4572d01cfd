"""Both halves of a federated run, in one process and without FLARE: the local engine's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import SITES, in_time, local_run, make_plan, make_small
from torch import Tensor

from pf2lora.adapters.layers import Adapted
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.outcome import sent_bytes
from pf2lora.methods import METHODS
from pf2lora.methods.bilevel import ROUNDOFF
from pf2lora.run.evaluation import measure, models_in_use

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


FEDERATED = [name for name, kind in METHODS.items() if kind.federated]


ALL: dict[str, Any] = {}
HALF: dict[str, Any] = {"participation": 0.5, "weighting": "size"}
RATES: dict[str, Any] = {"schedule": "cosine", "warmup": 0.3, "class_weights": "balanced"}
NONE_SET: dict[str, Any] = {"lr": "auto", "client_lr": "auto"}  # the defaults


@pytest.mark.parametrize(
    ("method", "variant"),
    [
        *(pytest.param(method, ALL, id=f"all-{method}") for method in FEDERATED),
        *(pytest.param(m, HALF, id=f"half-by-size-{m}", marks=in_time(m)) for m in FEDERATED),
        *(pytest.param(m, RATES | HALF, id=f"rates-{m}") for m in ("pf2lora", "homlora-bias", "fedadam")),
        *(pytest.param(m, NONE_SET, id=f"no-rate-set-{m}") for m in ("pf2lora", "fedadam", "hetlora")),
    ],
)
def test_every_method_gives_the_local_engines_numbers(
    tmp_path: Path, method: str, variant: dict[str, Any]
) -> None:
    plan = make_plan(method, config={"rounds": 4} | variant)
    small = make_small(tmp_path, plan)
    small.run()
    state, common, _ = local_run(tmp_path, plan)
    assert small.coordinator.common is not None
    assert common.norm() > 0.1
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(SITES):  # y and the served x of every site, too
        rounds = small.sessions[site].folder.rounds()
        saved = small.sessions[site].folder.load(rounds[-1], small.setups[site].initial) if rounds else None
        own = saved.state if saved else small.setups[site].initial
        # AdamW makes whole steps of gradients that are hardly more than rounding, so y may differ by more than x.
        assert own.y.numel() == 0 or (own.y[0] - state.y[k]).abs().max() <= 3e-5
        served = small.setups[site].method.receive(own, small.coordinator.common, 4)
        assert (served.x[0] - state.x[k]).abs().max() <= 1e-5


@pytest.mark.parametrize("method", [name for name in FEDERATED if name != "hetlora"])  # whose ranks change
def test_the_bytes_reported_are_those_on_the_wire(tmp_path: Path, method: str) -> None:
    """Adapter and head, the mean over rounds and sites: of what the method counts, and of what really was sent."""
    small = make_small(tmp_path, make_plan(method, config={"rounds": 2}))
    small.greet()
    while not small.coordinator.over:
        small.round()
    bytes_sent = []
    for site, data in small.messages:
        message = messages.decode(data)
        if message.kind == "update":
            setup = small.setups[site]
            numbers = sum(t.numel() for t in message.tensors.values())
            assert [numbers] == setup.method.sent_numbers(setup.initial, message.round)
            bytes_sent.append(sum(t.nbytes for t in message.tensors.values()))
    assert len(bytes_sent) == 2 * len(SITES)
    assert sent_bytes(small.plan, small.coordinator).total == pytest.approx(sum(bytes_sent) / len(bytes_sent))


def test_a_site_leaves_the_second_order_term_out_where_the_local_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROUNDOFF, "float32", 10.0)  # every share is under it
    plan = make_plan("pf2lora", config={"rounds": 4, "hypergradient_mode": "auto"})
    small = make_small(tmp_path, plan)
    small.run()
    state, common, _ = local_run(tmp_path, plan)
    assert small.coordinator.common is not None
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(SITES):
        own = small.sessions[site].folder.newest_before(99, small.setups[site].initial).state
        assert own.opt.age[0] == state.opt.age[k] > 0  # it was left out, and a site remembers that


def test_the_scores_are_the_local_engines(tmp_path: Path) -> None:
    plan = make_plan("per-fedavg", config={"evaluate_every": 1})
    small = make_small(tmp_path, plan)
    small.run()
    final = json.loads((tmp_path / "server" / "final.json").read_text())
    state, _, trial = local_run(tmp_path, plan)
    scores = measure(trial, models_in_use(trial, state, 3)).scores
    for k, site in enumerate(SITES):
        served = final[site]["served"]
        assert served["rows"] == 20
        assert served["accuracy"] / 20 == pytest.approx(scores["accuracy"][k])
        assert served["loss"] / 20 == pytest.approx(scores["loss"][k], abs=1e-5)


def test_a_site_without_memory_for_a_batch_trains_on_some_of_its_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The round that ran out of memory is done again in parts: the local engine's numbers, which had the room."""
    plan = make_plan("homlora")
    small = make_small(tmp_path, plan)
    _, common, _ = local_run(tmp_path, plan)
    forward = Adapted.forward

    def bounded(self: Adapted, u: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(u) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, u)

    monkeypatch.setattr(Adapted, "forward", bounded)
    small.run()
    assert small.coordinator.common is not None
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    assert "rows of a client in a pass: from here on 2 at a time" in caplog.text


def test_hetlora_sites_send_and_get_only_their_ranks(tmp_path: Path) -> None:
    plan = make_plan(
        "hetlora", config={"methods": {"hetlora": {"r_min": 1, "r_max": 6, "gamma": 0.5, "penalty": 0.1}}}
    )
    small = make_small(tmp_path, plan)
    small.run()
    seen = set()
    for site, data in small.messages:
        fields, tensors = messages.decode(data)
        if fields["kind"] != "update":
            continue
        rounds = small.sessions[site].folder.rounds()
        if fields["round"] == rounds[-1]:
            saved = small.sessions[site].folder.load(rounds[-1], small.setups[site].initial)
            sent = sum(t.numel() for t in tensors.values())
            assert [sent] == small.setups[site].method.sent_numbers(saved.state, fields["round"])
            seen.add(sent)
            down = small.coordinator.common_for(site)
            assert sum(t.numel() for t in down.values()) == sent
    assert len(seen) > 1  # the payloads differ
