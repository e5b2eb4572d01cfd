"""Changes in fewer bits: nothing is lost, whoever is killed, and whatever is not exactly that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import SITES, Small, in_time, local_run, make_plan, make_small
from torch import Tensor

from pf2lora.core.layout import Entry, Layout
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.outcome import sent_bytes
from pf2lora.federation.protocol.site import SiteSession
from pf2lora.federation.protocol.wire import BLOCK, SCALE, Wire, moved, unpacked
from pf2lora.methods import METHODS
from pf2lora.methods.homlora import HomLoRA

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDED = ("bfloat16", "int8")
LAYOUT = Layout.of([Entry("m", "A", (3, 200)), Entry("m", "B", (90, 3)), Entry("c", "head", (5,), "bias")])
SLOW: dict[str, Any] = {"lr": 1e-4, "client_lr": 1e-4, "rounds": 6}


# --- the equation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [Wire(name) for name in ROUNDED], ids=ROUNDED)
def test_what_rounding_leaves_over_is_sent_later(wire: Wire) -> None:
    """x + Σ_k w_k e_k moves by Σ_k w_k (v_k − s_k), and what sites hold follows x within a step of its last change."""
    method, draw = HomLoRA(LAYOUT), torch.Generator().manual_seed(0)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    x = torch.randn(LAYOUT.size, generator=draw).double()
    held, exact = x.float(), x.clone()
    residuals: list[dict[str, Tensor]] = [{}, {}, {}]
    lost = torch.zeros_like(x)
    for number in range(2, 12):
        change = wire.answer(LAYOUT, x, held)
        before, held = x - held.double(), moved(LAYOUT, held, change)
        assert (x - held.double()).abs().max() <= before.abs().max() / 100
        served = messages.to_tensors(LAYOUT, held.double(), None, torch.float64)
        steps = 1e-4 * torch.randn(3, LAYOUT.size, generator=draw).double()
        merged = torch.zeros_like(x)
        for k, weight in enumerate(weights):
            sent = held.double() + steps[k]
            tensors, residuals[k] = wire.update(method, number, sent, None, served, residuals[k])
            wire.check_update(method, number, tensors)
            numbers = {name: unpacked(tensors, name).double() for name in LAYOUT.by_name}
            merged += weight * messages.to_flat(LAYOUT, numbers, torch.float64)
        x, exact = x + merged, exact + weights @ steps
        left = [messages.to_flat(LAYOUT, rest, torch.float64) for rest in residuals]
        torch.testing.assert_close(
            x + weights @ torch.stack(left), exact, rtol=0, atol=1e-14
        )  # its last sum apart
        lost += weights @ (steps - torch.stack([wire_once(wire, step) for step in steps]))
    bound = 1e-4 / (100 if wire.name == "bfloat16" else 20)
    assert 0 < (x - exact).abs().max() < bound  # it does not grow with the rounds …
    assert lost.norm() > 2 * (x - exact).norm()  # … as what is never made good does


def wire_once(wire: Wire, step: Tensor) -> Tensor:
    return messages.to_flat(
        LAYOUT,
        {
            n: unpacked(wire.packed(n, t), n)
            for n, t in messages.to_tensors(LAYOUT, step, None, step.dtype).items()
        },
    ).double()


def test_int8_has_a_step_for_each_block_and_half_of_it_is_the_error() -> None:
    change = torch.randn(3, BLOCK, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    change *= torch.tensor([1e-6, 1.0, 0.0]).unsqueeze(1)
    packed = Wire("int8").packed("a", change.flatten())
    error = (unpacked(packed, "a") - change.flatten()).view(3, BLOCK).abs().amax(1)
    assert packed["a" + SCALE].shape == (3,)
    assert bool((error <= packed["a" + SCALE] / 2 * (1 + 1e-6)).all())
    assert error[0] < 1e-7 and error[2] == 0


# --- a run --------------------------------------------------------------------------------------------------------


def run(root: Path, wire: str, method: str = "homlora", **config: Any) -> Small:
    small = make_small(root, make_plan(method, wire=wire, config=SLOW | config))
    small.run()
    return small


def common_of(small: Small) -> Tensor:
    assert small.coordinator.common is not None
    return small.coordinator.common


def test_a_small_rate_is_not_rounded_away(tmp_path: Path) -> None:
    """At 1e-4 x moves by less than bfloat16 tells apart; its changes arrive all the same."""
    exact = run(tmp_path / "float32", "float32")
    method, start = exact.setups[SITES[0]].method, exact.setups[SITES[0]].initial
    began = method.send(start, 1)[1][0]
    learned = common_of(exact) - began
    rounded = began.bfloat16().float() + learned  # what x itself would have become in bfloat16, at best
    as_it_was = (rounded.bfloat16().float() - began.bfloat16().float() - learned).norm() / learned.norm()
    assert as_it_was > 0.3
    for wire, most in (("bfloat16", 0.01), ("int8", 0.05)):
        other = common_of(run(tmp_path / wire, wire)) - began
        assert 0 < (other - learned).norm() / learned.norm() < most, wire


@pytest.mark.parametrize("wire", ROUNDED)
@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=in_time(m)) for m in METHODS if METHODS[m].federated and not METHODS[m].pooled],
)
def test_every_method_stays_close_to_the_exact_wire(tmp_path: Path, method: str, wire: str) -> None:
    plan = make_plan(method, wire=wire, config={"rounds": 4, "participation": 0.75})
    small = make_small(tmp_path, plan)
    small.run()
    _, common, _ = local_run(tmp_path, plan)
    layout = small.coordinator.layout
    found = common_of(small)[: layout.shared], common[: layout.shared]
    if method in (
        "flexlora",
        "fedex-lora",
    ):  # whose factors are an SVD's: what they multiply to is what counts
        views = [layout.unpack(x.unsqueeze(0)) for x in found]
        pairs = list(layout.pairs("B", "A"))
        found = tuple(torch.cat([(v[B.name] @ v[A.name]).flatten() for B, A in pairs]) for v in views)  # type: ignore[assignment]
    # The weakest directions of FlexLoRA's SVD turn with any rounding, and Adam steps as far along them as along others.
    most = 0.1 if method == "flexlora" else 0.005
    assert 0 < (found[0] - found[1]).norm() / found[1].norm() < most


def test_the_bytes_are_those_reported(tmp_path: Path) -> None:
    for wire, least in (("bfloat16", 2.0), ("int8", 3.7)):
        small = run(tmp_path / wire, wire, method="rolora")
        sent, rounds = [0, 0], small.plan.run.training.rounds
        for _, data in small.messages:
            message = messages.decode(data)
            if message.kind == "update":
                bytes_sent = sum(t.nbytes for t in message.tensors.values())
                sent = [sent[0] + bytes_sent, max(sent[1], bytes_sent)]
                if message.round == rounds:
                    assert sent[1] >= least * bytes_sent * 0.9  # the first was whole
        assert sent_bytes(small.plan, small.coordinator).total == pytest.approx(sent[0] / rounds / len(SITES))


def requests_seen(small: Small, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Who was served whole and who a change, from now on."""
    seen: list[tuple[str, dict[str, Any]]] = []
    answer = SiteSession.answer

    def watched(session: SiteSession, request: messages.Message) -> bytes:
        seen.append((session.setup.client, request.fields))
        return answer(session, request)

    monkeypatch.setattr(SiteSession, "answer", watched)
    return seen


@pytest.mark.parametrize("wire", ROUNDED)
def test_kills_change_nothing(tmp_path: Path, wire: str) -> None:
    """Server and sites are started again from their disks in every round, once after the answers were lost."""
    whole = run(tmp_path / "whole", wire, method="pf2lora")
    broken = make_small(tmp_path / "broken", whole.plan)
    broken.greet()
    while not broken.coordinator.over:
        if broken.coordinator.done == 3:
            broken.ask(
                broken.coordinator.requests(list(SITES), set())
            )  # the answers are lost with the server
        if broken.coordinator.done:
            broken.start_server()
        for site in SITES:
            broken.sessions[site].folder.close()
            broken.sessions[site] = broken.start_site(site)
        broken.round()
    assert torch.equal(common_of(broken), common_of(whole))
    assert whole.coordinator.held is not None and broken.coordinator.held is not None
    assert torch.equal(broken.coordinator.held, whole.coordinator.held)
    for site in SITES:
        last, initial = whole.plan.run.training.rounds, whole.setups[site].initial
        one, other = (s.sessions[site].folder.load(last, initial) for s in (whole, broken))
        assert torch.equal(one.state.x, other.state.x) and torch.equal(one.state.y, other.state.y)
        assert one.wire.residual.keys() == other.wire.residual.keys() != set()
        assert all(torch.equal(rest, other.wire.residual[n]) for n, rest in one.wire.residual.items())


def test_who_missed_a_round_gets_all_of_x(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_small(tmp_path, make_plan("homlora", wire="int8", config=SLOW))
    small.greet()
    seen = requests_seen(small, monkeypatch)
    small.round()
    small.round()
    assert [("change_of" in fields) for _, fields in seen] == [False] * 8  # nothing, then all of x
    seen.clear()
    small.round(list(SITES[:3]))
    small.round()
    assert [("change_of" in f) for _, f in seen] == [True] * 6 + [False]
    small.round()
    assert ["change_of" in f for _, f in seen[-4:]] == [True] * 4
    held = {site: small.sessions[site].served for site in SITES}
    assert all(torch.equal(h, held[SITES[0]]) for h in held.values())  # type: ignore[arg-type]


def test_a_site_that_does_not_hold_it_says_so_and_is_served_whole(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", wire="bfloat16", config=SLOW))
    small.greet()
    small.round()
    small.round()
    lost = small.sessions[SITES[1]]
    assert lost.latest is not None and lost.latest.wire.served is not None
    lost.latest.wire.served[0] += 1
    record = small.round()
    assert record["answered"] == [SITES[0], *SITES[2:]] and "all of it next" in record["refused"][SITES[1]]
    assert record["stopped"] == [] and record["take_back"] == []
    assert small.round()["answered"] == list(SITES)


def test_a_refused_update_takes_its_leftovers_back(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", wire="int8", config=SLOW))
    small.greet()
    small.round()
    small.round()
    before = small.sessions[SITES[2]].latest
    small.tamper = lambda site, data: enlarged(data) if site == SITES[2] else data
    assert SITES[2] in small.round()["refused"]  # the checks see what was decoded
    small.tamper = lambda site, data: data
    small.ask(small.coordinator.requests(list(SITES), set()))
    now = small.sessions[SITES[2]].folder.load(3, small.setups[SITES[2]].initial)
    assert before is not None
    assert all(torch.equal(rest, now.wire.residual[n]) for n, rest in before.wire.residual.items())


def enlarged(data: bytes) -> bytes:
    fields, tensors = messages.decode(data)
    return messages.encode(fields, {n: 1e5 * t if n.endswith(SCALE) else t for n, t in tensors.items()})


def test_what_rounding_left_over_never_leaves(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", wire="bfloat16", config=SLOW))
    small.greet()
    for _ in range(3):
        small.round()
    for site in SITES:
        latest = small.sessions[site].latest
        assert latest is not None
        for rest in latest.wire.residual.values():
            assert rest.abs().max() > 0
            assert not any(rest.numpy().tobytes() in data for _, data in small.messages)


# --- what is refused ----------------------------------------------------------------------------------------------


def changed(**parts: Any) -> dict[str, Tensor]:
    """A whole int8 update of round 2 with some tensors replaced; None takes one away."""
    tensors, _ = Wire("int8").update(HomLoRA(LAYOUT), 2, torch.ones(LAYOUT.size), None, {}, {})
    tensors |= {name.replace("_", "."): part for name, part in parts.items()}
    return {name: part for name, part in tensors.items() if part is not None}


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"m_A_scale": None}, "'m.A.scale' is missing"),
        ({"m_A_scale": torch.ones(2)}, "is not 3 numbers of float32"),
        ({"m_A_scale": torch.ones(3).double()}, "is not 3 numbers of float32"),
        ({"m_A_scale": torch.tensor([1.0, torch.nan, 1.0])}, "negative or not finite"),
        ({"m_A_scale": torch.tensor([1.0, torch.inf, 1.0])}, "negative or not finite"),
        ({"m_A_scale": torch.tensor([1.0, -1.0, 1.0])}, "negative or not finite"),
        ({"m_A": torch.full((3, 200), -128, dtype=torch.int8)}, "below -127"),
        ({"m_A": torch.ones(3, 200)}, "is torch.float32, not torch.int8"),
        ({"m_A": torch.ones(3, 201, dtype=torch.int8)}, "has shape"),
        ({"m_C_scale": torch.ones(3)}, "'m.C.scale' is not part of"),
    ],
)
def test_what_is_no_change_is_refused(parts: dict[str, Any], line: str) -> None:
    wire, method = Wire("int8"), HomLoRA(LAYOUT)
    wire.check_update(method, 2, changed())
    with pytest.raises(Malformed, match=line):
        wire.check_update(method, 2, changed(**parts))
    with pytest.raises(Malformed):
        wire.check_update(method, 1, changed())  # nothing is held that it could be a change of


def test_a_change_that_makes_x_infinite_is_refused(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", wire="int8", config=SLOW))
    small.greet()
    small.round()

    def huge(site: str, data: bytes) -> bytes:
        fields, tensors = messages.decode(data)
        top = torch.finfo(torch.float32).max
        large = {n: torch.full_like(t, 127 if t.dtype == torch.int8 else top) for n, t in tensors.items()}
        return messages.encode(fields, large) if site == SITES[0] else data

    small.tamper = huge
    assert "not finite" in small.round()["refused"][SITES[0]]
