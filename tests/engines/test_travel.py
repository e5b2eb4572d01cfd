"""Clients who wait on the host come and go while others are trained: the numbers of a run in which nobody has to. What
needs a CUDA device is skipped without one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_in_graphs import stepper_of
from tiny import tiny_problem

from pf2lora.core.method import over_tensors
from pf2lora.engines import travel
from pf2lora.engines.batches import EncodedSource
from pf2lora.engines.local import Schedule, train
from pf2lora.methods import METHODS


class StandInStream:
    """A stream without CUDA, which notes what is asked of it."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def record_event(self) -> StandInStream:
        return self

    def wait_event(self, event: Any) -> None:
        self.asked.append("arrived")

    def wait_stream(self, other: Any) -> None:
        self.asked.append("leaving")

    def synchronize(self) -> None:
        self.asked.append("home")


def test_those_who_wait_travel_while_others_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clients, two a pass: the second and third pass's come ahead, everybody goes home beside the next pass, and
    all are home when the round ends. The numbers are those of a run in which nobody travels beside."""
    ends, asked = [], list[str]()
    stream = StandInStream(asked)
    for beside in (False, True):
        p = tiny_problem("bert", sizes=(5, 9, 2, 6, 4))
        method = METHODS["homlora"](p.layout)
        if beside:
            monkeypatch.setattr(travel.Travel, "beside", True)
            monkeypatch.setattr(travel, "side_stream", lambda: stream)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
            monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
            monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        schedule = Schedule(2, 2, clients_per_pass=2)
        *_, last = train(method, p.F, method.init(p.x, p.y), p.source, schedule)
        ends.append(last.served.x)
    assert torch.equal(*ends)
    a_round = ["leaving", "arrived", "leaving", "arrived", "leaving", "home"]
    assert asked == a_round * 2


def test_who_was_sent_ahead_for_another_pass_is_fetched_anew() -> None:
    """After a pass that was halved, others train next."""
    p = tiny_problem("bert")
    state = METHODS["homlora"](p.layout).init(p.x, p.y)
    travelling = travel.Travel(state, torch.device("cpu"))
    travelling.ahead = travel.SetOut([1, 2], over_tensors(torch.zeros_like, state), None)
    assert torch.equal(travelling.fetch([1]).x, state.x[1:2]) and travelling.ahead is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="states travel to a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_travelling_states_give_the_plain_numbers(graphs: bool) -> None:
    """Three passes a round, of which memory ends in one: all clients at home on the device, and two a pass."""
    device, ends = torch.device("cuda"), []
    for per_pass in (None, 2):
        p = tiny_problem("roberta", sizes=(5, 9, 2, 6, 4))
        assert p.model is not None and isinstance(p.source, EncodedSource)
        p.model.model.to(device)  # type: ignore[arg-type]
        source, calls = replace(p.source, data=p.source.data.to(device)), 0

        def F(x: torch.Tensor, y: torch.Tensor, batch: Any, p: Any = p, alone: bool = per_pass == 2) -> Any:
            nonlocal calls
            calls += 1
            if alone and calls > 20 and batch.clients > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return p.F(x, y, batch)

        method = METHODS["homlora"](p.layout)
        schedule = Schedule(4, 3, clients_per_pass=per_pass)
        state = method.init(p.x, p.y)
        *_, last = train(method, F, state, source, schedule, device=device, stepper=stepper_of(F, graphs))
        ends.append(last.served.x.cpu())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-9)
