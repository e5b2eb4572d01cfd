"""A masked round is a sum of what sites learned from one x: a server that serves another to some has noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from masked_federation import make_masked, masked_plan
from small_federation import SITES, Small, make_plan, make_small

from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.allow_list import read_request
from pf2lora.federation.protocol.messages import Malformed, Message, to_tensors
from pf2lora.federation.protocol.site_masks import start_digest

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

VICTIM = "site-3"
Requests = dict[str, bytes]


def lying(small: Small, lie: Callable[[Message], Message]) -> Callable[[Requests], Requests]:
    """What all sites but one are told to train from is changed by the server."""
    honest = small.ask

    def ask(requests: Requests) -> Requests:
        told = dict(requests)
        for site, data in requests.items():
            message = messages.decode(data)
            if message.kind == "train" and site != VICTIM:
                told[site] = messages.encode(*lie(message))
        return honest(told)

    return ask


def dead(message: Message) -> Message:
    """Where A = B = 0 both gradients are zero: whoever begins there stays there."""
    zeros = {
        name: torch.zeros_like(t) if name.endswith((".A", ".B")) else t.clone()
        for name, t in message.tensors.items()
    }
    return message._replace(tensors=zeros)


def read_off(small: Small, number: int) -> tuple[float, float]:
    """How far A and B of the round's sum are from the victim's own, and how large those are."""
    method = small.setups[VICTIM].method
    saved = small.sessions[VICTIM].folder.load(number, small.setups[VICTIM].initial).state
    leaves, (own,) = method.leaves(number), method.send(saved, number)[1]
    assert small.coordinator.common is not None
    total = small.coordinator.common * len(SITES)
    parts = [slice(leaves.offsets[e.name], leaves.offsets[e.name] + e.size) for e in leaves.entries]
    factors = torch.cat(
        [torch.arange(len(own))[at] for e, at in zip(leaves.entries, parts) if e.kind in "AB"]
    )
    return float((total - own)[factors].abs().max()), float(own[factors].abs().max())


def test_a_sum_of_one_site_beside_others_that_learn_nothing_is_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 2}))
    small.greet()
    small.round()
    monkeypatch.setattr(small, "ask", lying(small, dead))
    assert small.round()["answered"] == list(SITES)
    error, size = read_off(small, 2)
    assert size < 10 and error > 1e3 * size


def test_sites_that_are_served_nothing_begin_where_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two steps: the others learn nothing in a round that is noise, and then go on from what they have."""
    small = make_masked(tmp_path, masked_plan("homlora"))
    small.greet()
    small.round()
    honest = small.ask
    monkeypatch.setattr(small, "ask", lying(small, dead))
    small.round()
    monkeypatch.setattr(small, "ask", lying(small, lambda message: message._replace(tensors={})))
    small.coordinator.common = None  # the victim is served none either
    small.round()
    monkeypatch.setattr(small, "ask", honest)
    error, size = read_off(small, 3)
    assert error > size / 2
    start = small.setups[VICTIM].initial.x
    state, _ = small.sessions["site-1"].received(4, {})
    assert torch.equal(state.x, start)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", ["train", "measure", "finish"])
def test_no_server_says_where_round_1_begins(tmp_path: Path, masked: bool, kind: str) -> None:
    small = (
        make_masked(tmp_path, masked_plan("homlora"))
        if masked
        else make_small(tmp_path, make_plan("homlora", SITES[:1]))
    )
    setup = small.setups["site-1"]
    x = to_tensors(setup.method.arrives(0), setup.initial.x[0], None, torch.float32)
    request = read_request(messages.encode({"kind": kind, "round": 1}, x))
    with pytest.raises(Malformed, match="round 1, which begins where the plan says"):
        small.sessions["site-1"].answer(request)
    assert not list((tmp_path / "state").rglob("round-*.safetensors"))


@pytest.mark.parametrize("away", ["train", "keys"])
def test_who_drops_out_in_a_later_round_takes_nobodys_masks_along(
    tmp_path: Path, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes them away by the x that it served; a site that comes back is served the same."""
    small = make_masked(tmp_path, masked_plan("fedadam"))
    small.greet()
    small.round()
    everybody = small.ask

    def without(requests: Requests) -> Requests:
        kinds = {messages.decode(data).kind for data in requests.values()}
        return everybody({s: data for s, data in requests.items() if kinds != {away} or s != "site-2"})

    monkeypatch.setattr(small, "ask", without)
    assert small.round()["answered"] == ["site-1", "site-3", "site-4"]
    monkeypatch.setattr(small, "ask", everybody)
    assert small.round()["answered"] == list(SITES)
    assert small.coordinator.common is not None and float(small.coordinator.common.abs().max()) < 10


def test_two_x_have_two_digests_whatever_they_differ_by() -> None:
    x = torch.zeros(5)
    others = [None, x, -x, torch.zeros(6), torch.nextafter(x, torch.ones(5))]
    assert len({start_digest(other) for other in others}) == len(others)
    assert start_digest(torch.zeros(10)[::2]) == start_digest(x)
