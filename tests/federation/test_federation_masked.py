"""Masked runs: the plain run's numbers, and a server that sees nothing but sums."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from masked_federation import make_masked, masked_plan, plain
from safetensors.torch import load_file
from small_federation import (
    SITES,
    in_time,
    local_run,
    make_plan,
    make_small,
)

from pf2lora.core.privacy import Mechanism
from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages, private, ring
from pf2lora.federation.protocol.outcome import sent_bytes
from pf2lora.federation.protocol.problems import PROBLEMS
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.stopping import QuorumMissed
from pf2lora.methods import METHODS

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

FEDERATED = [name for name, kind in METHODS.items() if kind.federated and not kind.pooled]
REFUSED = ("hetlora", "scaffold", "fedex-lora", "flexlora")  # more than a sum of x is needed
MASKS = "it refused the round's masks or has lost them"


@pytest.mark.parametrize("method", [pytest.param(m, marks=in_time(m)) for m in FEDERATED])
def test_every_method_gives_the_plain_runs_numbers_or_says_why_not(tmp_path: Path, method: str) -> None:
    if method in REFUSED:
        with pytest.raises(UserError, match=f"{method}'s updates cannot be masked.*: its server needs more"):
            make_masked(tmp_path, masked_plan(method))
        return
    plan = masked_plan(method, config={"rounds": 2, "participation": 0.75})
    masked = make_masked(tmp_path, plan)
    masked.run()
    other = make_small(tmp_path / "plain", plain(plan))
    other.run()
    found, expected = masked.coordinator.common, other.coordinator.common
    assert found is not None and expected is not None
    assert expected.norm() > 0.01
    # The plain mean is of float32 numbers, the masked one of whole steps of 2⁻³²; AdamW enlarges what they differ by.
    assert (found - expected).abs().max() <= 1e-5


def test_one_round_is_exact_to_the_fixed_points_step(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    small.round()
    exact = torch.zeros(small.coordinator.layout.size, dtype=torch.float64)
    for site in SITES:
        saved = small.sessions[site].latest
        assert saved is not None
        exact += small.setups[site].method.send(saved.state, 1)[1][0].double() / len(SITES)
    assert small.coordinator.common is not None
    found = small.coordinator.common
    assert bool(((found.double() - exact).abs() <= ring.STEP / 2 + found.abs() * 2.0**-24).all())


def test_what_the_server_saw_is_noise_and_the_sum_is_not(tmp_path: Path) -> None:
    """Everything that reached the server is looked through: no update is in it, as floats or in the ring."""
    small = make_masked(tmp_path, masked_plan("pf2lora", config={"rounds": 2}))
    small.run()
    updates = [
        (s, messages.decode(data)) for s, data in small.messages if messages.decode(data).kind == "update"
    ]
    seen = b"".join(data for _, data in small.messages)
    assert len(updates) == 2 * len(SITES)
    for site in SITES:
        for number in (1, 2):
            state = small.sessions[site].folder.load(number, small.setups[site].initial).state
            (own,) = small.setups[site].method.send(state, number)[1]
            assert own.numpy()[:4].tobytes() not in seen
            assert ring.to_ring(own, 4).numpy()[:4].tobytes() not in seen
    for _, message in updates:
        assert {tensor.dtype for tensor in message.tensors.values()} == {torch.int64}
    numbers = torch.cat([t.flatten() for _, m in updates for t in m.tensors.values()])
    far = (numbers.double().abs() > 2.0**62).double()  # half of the ring, where x would be next to zero
    assert abs(float(far.mean()) - 0.5) < 6 * 0.5 / len(far) ** 0.5
    first = [torch.cat([t.flatten() for t in m.tensors.values()]) for _, m in updates if m.round == 1]
    assert not torch.equal(first[0], first[1])


def test_the_bytes_reported_are_those_on_the_wire(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    small.round()
    sent = [messages.decode(data) for _, data in small.messages]
    each = [sum(t.nbytes for t in m.tensors.values()) for m in sent if m.kind == "update"]
    assert sent_bytes(small.plan, small.coordinator).total == pytest.approx(sum(each) / len(each))


# --- who drops out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["keys", "shares", "train", "unmask"])
def test_a_site_that_stops_anywhere_in_a_round_costs_only_its_own_part(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = masked_plan("homlora", config={"rounds": 2})
    small = make_masked(tmp_path, plan)
    small.greet()
    everybody = small.ask

    def without(requests: dict[str, bytes]) -> dict[str, bytes]:
        away = "site-2" if {messages.decode(data).kind for data in requests.values()} == {kind} else ""
        return everybody({site: data for site, data in requests.items() if site != away})

    with monkeypatch.context() as patch:
        patch.setattr(small, "ask", without)
        record = small.round()
    there = [s for s in SITES if s != "site-2" or kind == "unmask"]
    other = make_small(tmp_path / "plain", plain(plan))
    other.greet()
    other.round(there)
    found, expected = small.coordinator.common, other.coordinator.common
    assert found is not None and expected is not None
    assert (found - expected).abs().max() <= 1e-6
    assert record["answered"] == there
    assert small.round()["answered"] == list(SITES)  # it is in the next one


def test_a_site_whose_round_goes_wrong_is_left_out_of_the_sum(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 2}))
    small.greet()
    left_out = small.sessions["site-3"].left_out
    small.sessions["site-3"].train = lambda number, state, saved, fields: left_out(  # type: ignore[method-assign]
        fields, state, saved, "a bad batch", torch.tensor([torch.nan])
    )
    record = small.round()
    assert record["refused"] == {"site-3": PROBLEMS["loss"]}
    assert record["answered"] == ["site-1", "site-2", "site-4"]
    assert small.coordinator.common is not None and float(small.coordinator.common.abs().max()) < 10


def test_a_site_that_was_started_again_in_a_round_is_in_the_next(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 2}))
    small.greet()
    masks = small.setups["site-1"].masks
    assert masks is not None

    def forgetful(site: str, data: bytes) -> bytes:
        if site == "site-1" and messages.decode(data).kind == "shares":
            masks.now = None  # its memory is gone
            small.tamper = lambda site, data: data
        return data

    small.tamper = forgetful
    record = small.round()
    assert record["refused"] == {"site-1": MASKS} and "site-1" not in record["take_back"]
    assert record["stopped"] == []
    assert small.round()["answered"] == list(SITES)


def test_too_few_for_a_sum_stop_the_run_and_it_goes_on_when_they_are_there(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", quorum=0.25))
    small.greet()
    with pytest.raises(QuorumMissed, match="site-1: a masked sum takes 3 sites, and 2 are left"):
        small.round(["site-1", "site-2"])
    small.run()
    assert small.coordinator.done == 3


def test_a_round_is_summed_once_and_a_server_that_lost_the_sum_goes_on_with_the_next(tmp_path: Path) -> None:
    """Of two sums of one round, with and without a site, that site's part would follow."""
    small = make_masked(tmp_path, masked_plan("homlora"))
    small.greet()
    small.round()
    kept = small.coordinator.common
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small.coordinator, "finish_round", lambda *args: None)
        small.round()  # the server dies before it has saved round 2
    small.start_server()
    small.greet()
    record = small.round()
    assert record["round"] == 2 and record["answered"] == []
    assert record["refused"] == dict.fromkeys(SITES, PROBLEMS["summed"])
    assert kept is not None and small.coordinator.common is not None
    assert torch.equal(small.coordinator.common, kept)
    small.start_server()  # and from its disk
    assert small.round()["answered"] == list(SITES)
    assert not torch.equal(small.coordinator.common, kept)


def test_a_round_whose_masks_stay_on_counts_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_masked(tmp_path, masked_plan("homlora"))
    small.greet()
    everybody = small.ask

    def few(requests: dict[str, bytes]) -> dict[str, bytes]:
        unmask = {messages.decode(data).kind for data in requests.values()} == {"unmask"}
        return everybody(dict(list(requests.items())[:2]) if unmask else requests)

    with monkeypatch.context() as patch:
        patch.setattr(small, "ask", few)
        record = small.round()
    assert record["answered"] == [] and small.coordinator.common is None
    assert all("2 shares, of which 3 are needed" in why for why in record["refused"].values())
    assert record["take_back"] == list(SITES)
    record = small.round()
    assert record["answered"] == list(SITES) and small.coordinator.common is not None
    saved = small.sessions["site-1"].latest
    assert (
        saved is not None and saved.steps == 4
    )  # with batches of its own: those of round 1 are not drawn again


# --- with noise ---------------------------------------------------------------------------------------------


def test_noise_at_the_sites_is_at_least_that_of_the_plan(tmp_path: Path) -> None:
    """Four sites add a third of the variance each: √(4/3) times the plan's deviation, in the sum."""
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    config = {"dp_noise": 2.0, "dp_clip": 0.05, "rounds": 1, "dp_noise_seed": 1}
    plan = masked_plan("homlora", config=config)
    small = make_masked(tmp_path, plan)
    small.run()
    quiet = make_masked(tmp_path / "quiet", masked_plan("homlora", config=config | {"dp_noise": 1e-9}))
    quiet.run()
    found, without = small.coordinator.common, quiet.coordinator.common
    assert found is not None and without is not None
    noise = (found - without).double() * len(SITES)
    assert float(noise.std()) == pytest.approx(2.0 * 0.05 * (4 / 3) ** 0.5, rel=0.1)
    cost = small.coordinator.spent()
    assert cost is not None and cost.noise == 2.0 and cost.clip == 0.05
    _, local, _ = local_run(tmp_path / "quiet", plain(quiet.plan))
    setup = quiet.setups[SITES[0]]
    whole = private.absolute(setup.method, setup.initial, without, 1)
    assert (whole - local).abs().max() <= 1e-5  # the same clip and the same denominator
    assert isinstance(setup.trial.schedule.privacy, Mechanism)


def test_a_masked_private_run_sends_no_figure_of_rows(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    config = {"dp_noise": 2.0, "dp_clip": 0.05, "rounds": 1, "evaluate_every": 1}
    small = make_masked(tmp_path, masked_plan("homlora", config=config))
    small.run()
    for _, data in small.messages:
        fields = set(messages.decode(data).fields) - {"kind", "round"}
        assert not fields & {"loss", "served", "before", "validation", "train_rows", "test_rows"}
    spent = small.coordinator.spent()
    assert spent is not None and spent.epsilon is not None


# --- real processes -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_masked_rehearsal_has_the_local_runs_numbers(tmp_path: Path) -> None:
    """With the kits' own certificates."""
    from test_federation_flare import rehearse_command

    command = [*rehearse_command(tmp_path, 3, SITES[:3]), "--masked"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "round 3 of 3: 3 answered" in done.stderr
    _, common, trial = local_run(tmp_path, make_plan("pf2lora", SITES[:3]), "test")
    saved = load_file(tmp_path / "run" / "state" / "common.safetensors")
    flat = trial.model.common_layout.pack({name: t[None] for name, t in saved.items()})[0]
    assert (flat - common).norm() <= 1e-4 * common.norm()  # AdamW makes whole steps of next to nothing


@pytest.mark.slow
def test_a_killed_job_process_loses_its_keys_and_the_run_goes_on(tmp_path: Path) -> None:
    from flare_federation import flare

    plan = masked_plan("homlora", config={"rounds": 25, "steps": 20}, deadline=10)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.round() >= 3, 120, "three rounds")
        run.kill_job("site-2")
        run.wait(lambda: run.state() == "finished", 240, "the end")
        session = ServerSession(plan, run.run)
        assert session.done == 25 and session.common is not None
        assert all({"site-1", "site-3", "site-4"} <= set(r["answered"]) for r in session.records)
        assert "site-2" in list(session.records)[-1]["answered"]
