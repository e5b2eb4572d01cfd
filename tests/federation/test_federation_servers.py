"""What a server keeps between rounds survives it, and answers that differ by site and round arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_federation import SITES, Small, local_run, local_trial, make_plan, make_small

from pf2lora.core.method import tensors_of
from pf2lora.engines.local import train
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.checkpoints import StateFolderError, restored
from pf2lora.federation.protocol.outcome import collect
from pf2lora.methods import METHODS

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

METHOD = "alternating"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    monkeypatch.setitem(METHODS.own, METHOD, "alternating:Alternating")  # as if it were installed
    return make_small(tmp_path, make_plan(METHOD, config={"rounds": 4, "participation": 0.75}))


def test_a_federation_gives_the_local_engines_numbers(small: Small, tmp_path: Path) -> None:
    """Of a round that it missed, this method's site never hears: all take part."""
    small = make_small(tmp_path / "all", make_plan(METHOD, config={"rounds": 4}))
    small.run()
    state, common, trial = local_run(small.root, small.plan)
    assert small.coordinator.common is not None and small.coordinator.common.shape == common.shape
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(SITES):
        session = small.sessions[site]
        served, _ = session.received(5, small.coordinator.common_for(site))
        part = trial.method.arrives(4)
        own, local = (trial.method.layout.select(x, part) for x in (served.x, state.x[k : k + 1]))
        assert (own - local).abs().max() <= 1e-5


def test_a_round_may_send_only_what_it_declares(small: Small) -> None:
    small.run()
    kinds = {
        message.round: {name.rpartition(".")[2] for name in message.tensors}
        for _, data in small.messages
        if (message := messages.decode(data)).fields["kind"] == "update"
    }
    assert kinds == {1: {"B"}, 2: {"A"}, 3: {"B"}, 4: {"A"}}


def test_a_server_that_is_started_again_has_kept_what_the_method_keeps(small: Small, tmp_path: Path) -> None:
    small.greet()
    while not small.coordinator.over:
        small.round()
        before = small.coordinator
        small.start_server()
        assert small.coordinator is not before
        for kept, was in zip(tensors_of(small.coordinator.kept), tensors_of(before.kept), strict=True):
            assert torch.equal(kept, was)
    through = make_small(tmp_path / "through", small.plan)
    through.run()
    assert small.coordinator.common is not None and through.coordinator.common is not None
    assert torch.equal(small.coordinator.common, through.coordinator.common)
    assert small.coordinator.kept.seen.tolist() == through.coordinator.kept.seen.tolist() != [10.0] * 4
    with safe_open(sorted((tmp_path / "server").glob("round-*"))[-1], "pt") as file:
        assert set(file.keys()) == {"common", "kept.0", "kept.1"}


def test_what_another_adapter_kept_is_refused(small: Small) -> None:
    small.greet()
    small.round()
    kept = small.coordinator.kept
    with pytest.raises(StateFolderError, match="belongs to another adapter"):
        restored(kept, [torch.zeros(3), *tensors_of(kept)[1:]], Path("round-000001.safetensors"))


@pytest.mark.parametrize("method", ["rolora", "fedadam", "scaffold", "fedsa-lora", "fedex-lora"])
def test_a_rehearsals_common_adapter_is_the_local_runs(tmp_path: Path, method: str) -> None:
    """Whatever the server's last answer holds: a half, a way from the start, control variates, no B, a residual."""
    plan = make_plan(method, config={"rounds": 2})
    small = make_small(tmp_path, plan)
    small.run()
    trial = local_trial(tmp_path, plan)
    *_, last = train(trial.method, trial.F, trial.state, trial.source, trial.schedule)
    (expected,) = trial.method.common(trial.state.x[:1], last.common, 2)
    trial.model.remove()
    collect(
        plan, trial.workload, tmp_path / "server", tmp_path / "out", [tmp_path / "state" / s for s in SITES]
    )
    found = load_file(tmp_path / "out" / "state" / "common.safetensors")
    for name, tensor in trial.method.layout.unpack(expected.unsqueeze(0)).items():
        assert (found[name] - tensor[0]).abs().max() <= 1e-5, name
