"""The engine goes on after any round, from what was served then, as an unbroken run does, to the last bit."""

from __future__ import annotations

import pytest
import torch
from tiny import SETTINGS, build, tiny_problem

from pf2lora.core.method import over_tensors
from pf2lora.engines.local import After, Schedule, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.no_cover
@pytest.mark.parametrize("clients_per_pass", [None, 1])
@pytest.mark.parametrize("setting", SETTINGS)
def test_going_on_after_any_round_changes_no_bit(setting: str, clients_per_pass: int | None) -> None:
    p = tiny_problem("bert", dropout=0.2)
    schedule = Schedule(rounds=4, steps=2, participation=0.67, clients_per_pass=clients_per_pass)
    method = build(setting, p)
    whole = [done.kept() for done in train(method, p.F, method.init(p.x, p.y), p.source, schedule)]
    for stop in range(1, 4):
        before = whole[stop - 1]
        rest = train(method, p.F, before.served, p.source, schedule, after=before.after)
        for expected, found in zip(whole[stop:], (done.kept() for done in rest), strict=True):
            assert (found.number, found.participants) == (expected.number, expected.participants)
            assert found.after[:3] == expected.after[:3]
            over_tensors(same, found.after.servers, expected.after.servers)
            assert torch.equal(found.stats.loss, expected.stats.loss)
            assert torch.equal(found.common, expected.common)
            for state in ("before", "served"):
                over_tensors(same, getattr(found, state), getattr(expected, state))


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert torch.equal(a, b)
    return a


def test_a_client_that_sat_out_goes_on_with_its_own_batches() -> None:
    """Steps are counted for each learner: the round's number alone would not do."""
    p = tiny_problem("bert")
    method = build("homlora", p)
    schedule = Schedule(rounds=3, steps=2, participation=0.34)
    *_, second, _ = train(method, p.F, method.init(p.x, p.y), p.source, schedule)
    assert second.number == 2 and sorted(second.after.steps_done) != [4, 4, 4]
    assert sum(second.after.steps_done) == 2 * 2 * len(second.participants)


def test_before_the_first_round_nothing_is_done() -> None:
    p = tiny_problem("bert")
    method = build("local", p)
    first, *_ = train(
        method, p.F, method.init(p.x, p.y), p.source, Schedule(rounds=2, steps=3), after=After()
    )
    assert first.after._replace(largest=()) == After(1, (3, 3, 3), servers=((),))
