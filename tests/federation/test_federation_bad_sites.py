"""A bad site does not cost the federation: it says so or is refused, sits its round out, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import SITES, changed, local_run, make_plan, make_small

from pf2lora.core.method import Loss, Method, State, StepStats, tensors_of
from pf2lora.engines import steps as engine_steps
from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.batches import BatchSource
from pf2lora.federation.protocol import messages, site
from pf2lora.federation.protocol.problems import PROBLEMS

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

BAD, STEPS = "site-2", 2  # breaks in its second round


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[State, StepStats, int], None]], None]:
    """Have something done to the bad site's state and stats after the local steps of its second round."""
    honest = engine_steps.local_steps

    def install(harm: Callable[[State, StepStats, int], None]) -> None:
        def broken(
            method: Method, F: Loss, state: State, source: BatchSource, *, clients: list[int], **more: Any
        ) -> tuple[State, StepStats]:
            state, stats = honest(method, F, state, source, clients=clients, **more)
            for column, (i, done) in enumerate(zip(clients, more["first_step"])):
                if source.names[i] == BAD and done == STEPS:
                    harm(state, stats, column)
            return state, stats

        monkeypatch.setattr(engine_steps, "local_steps", broken)
        monkeypatch.setattr(site, "local_steps", broken)

    return install


def no_loss(state: State, stats: StepStats, column: int) -> None:
    stats.loss[1, column] = torch.nan


def explosion(state: State, stats: StepStats, column: int) -> None:
    state.x[column] += 1e6


@pytest.mark.parametrize("method", ["pf2lora", "hetlora", "local"])
@pytest.mark.parametrize(("harm", "code"), [(no_loss, "loss"), (explosion, "update")])
def test_a_bad_site_sits_its_round_out_as_in_a_local_run(
    tmp_path: Path, breaks: Any, method: str, harm: Any, code: str
) -> None:
    breaks(harm)
    plan = make_plan(method, config={"rounds": 4})
    small = make_small(tmp_path, plan)
    small.run()
    assert [r["refused"] for r in small.coordinator.records] == [{}, {BAD: PROBLEMS[code]}, {}, {}]
    assert [BAD in r["answered"] for r in small.coordinator.records] == [True, False, True, True]
    assert all(r["stopped"] == [] for r in small.coordinator.records)
    state, common, _ = local_run(tmp_path, plan)
    if small.coordinator.common is not None:
        assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, name in enumerate(SITES):
        saved = small.sessions[name].folder.newest_before(99, small.setups[name].initial)
        assert saved.steps == 4 * STEPS
        assert saved.state.y.numel() == 0 or (saved.state.y[0] - state.y[k]).abs().max() <= 3e-5


def test_a_site_that_starts_again_remembers_its_bad_round(tmp_path: Path, breaks: Any) -> None:
    breaks(no_loss)
    small = make_small(tmp_path, make_plan("pf2lora", config={"rounds": 4}))
    small.greet()
    small.round()
    first = small.sessions[BAD].latest
    small.round()
    latest = small.sessions[BAD].latest
    assert first is not None and latest is not None and latest.largest == first.largest > 0
    small.sessions[BAD].folder.close()
    small.sessions[BAD] = small.start_site(BAD)
    again = small.sessions[BAD].folder.newest_before(3, small.setups[BAD].initial)
    assert (again.round, again.steps, again.largest) == (2, 2 * STEPS, latest.largest)
    for a, b in zip(tensors_of(again.state), tensors_of(latest.state)):
        assert torch.equal(a, b)
    assert BAD in small.round()["answered"]


def test_with_privacy_nobody_learns_of_a_bad_round(tmp_path: Path, breaks: Any) -> None:
    """That it went wrong is a figure of the site's rows: what leaves is a zero, in a message like any other."""
    pytest.importorskip("dp_accounting")
    breaks(no_loss)
    private = {"rounds": 3, "dp_noise": 0.5, "dp_clip": 0.05, "dp_noise_seed": 3}
    small = make_small(tmp_path, make_plan("homlora", config=private))
    sent: list[tuple[str, bytes]] = []
    small.tamper = lambda name, data: sent.append((name, data)) or data  # type: ignore[func-returns-value]
    small.greet()
    small.round()
    sent.clear()
    record = small.round()
    assert set(record["answered"]) == set(SITES) and not record["refused"]
    told = {name: messages.decode(data) for name, data in sent}
    assert len({(tuple(sorted(m.fields)), tuple(sorted(m.tensors))) for m in told.values()}) == 1
    assert all(not t.any() for t in told[BAD].tensors.values())
    assert all(any(t.any() for t in m.tensors.values()) for name, m in told.items() if name != BAD)
    saved = small.sessions[BAD].latest
    assert saved is not None and saved.steps == 2 * STEPS


def test_a_site_whose_update_the_server_refuses_takes_it_back(tmp_path: Path) -> None:
    """It learns of it with the next request: state and optimizer are those of the round before, the batches move on."""
    small = make_small(tmp_path, make_plan("pf2lora", config={"rounds": 4}))

    def huge(name: str, data: bytes) -> bytes:
        message = messages.decode(data)
        if name != BAD or small.coordinator.done != 1 or not message.tensors:
            return data
        return messages.encode(message.fields, {n: 1e6 * t for n, t in message.tensors.items()})

    small.tamper = huge
    small.greet()
    small.round()
    good = small.sessions[BAD].latest
    record = small.round()
    assert "beyond" in record["refused"][BAD] and record["take_back"] == [BAD] and record["stopped"] == []
    small.start_server()  # it is in the checkpoint, too
    asked = {s: messages.decode(d).fields for s, d in small.coordinator.requests(list(SITES), set()).items()}
    assert {s for s, fields in asked.items() if "take_back" in fields} == {BAD} and asked[BAD][
        "take_back"
    ] == 2
    seen: list[Any] = []
    session = small.sessions[BAD]
    honest = session.train
    session.train = lambda *args: seen.append(args) or honest(*args)  # type: ignore[method-assign,func-returns-value]
    assert BAD in small.round()["answered"]
    (_, state, saved, _), assert_good = seen[0], good
    assert assert_good is not None and saved.steps == 2 * STEPS and saved.round == 2
    for a, b in zip(tensors_of(saved.state), tensors_of(assert_good.state)):
        assert torch.equal(a, b)
    assert torch.equal(state.y, assert_good.state.y)
    assert small.coordinator.undo(BAD) == {}


@pytest.mark.parametrize("setting", [{"strict": True}, {"max_bad_clients": 0}])
def test_a_federation_can_be_told_to_stop(tmp_path: Path, breaks: Any, setting: dict[str, Any]) -> None:
    breaks(no_loss)
    small = make_small(tmp_path, changed(make_plan("pf2lora"), **setting))
    small.greet()
    small.round()
    with pytest.raises(Diverged, match=r"client 'site-2' is bad in round 2: its loss stopped being a number"):
        small.round()
