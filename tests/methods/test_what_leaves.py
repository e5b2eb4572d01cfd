"""Over every method, round and head: what crosses the network is declared, is a shared part of x or belongs to one, and
owes nothing to y."""

from __future__ import annotations

import pytest
import torch
from tiny import SETTINGS, build, tiny_problem

from pf2lora.core.layout import Layout
from pf2lora.engines.local import Schedule, train

HEADS = ("shared", "personal", "frozen")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_only_what_is_shared_or_belongs_to_it_is_declared(setting: str, head: str) -> None:
    p = tiny_problem("roberta", head=head)
    method = build(setting, p)
    shared = {e.name: e for e in p.layout.shared_entries}
    for number in range(1, 5):
        for declared in (method.leaves(number), method.arrives(number)):
            assert len(declared.by_name) == len(declared.entries)
            for entry in declared.entries:
                owner = next(name for name in shared if f"{entry.name}.".startswith(f"{name}."))
                assert entry.kind == shared[owner].kind
                assert all(n <= most for n, most in zip(entry.shape, shared[owner].shape, strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_another_y_sends_the_same(setting: str) -> None:
    p = tiny_problem("roberta", head="shared")
    method = build(setting, p)
    schedule = Schedule(rounds=3, steps=2)
    for done in train(method, p.F, method.init(p.x, p.y), p.source, schedule):
        state = done.before
        sent = [method.send(state._replace(y=y), done.number)[1] for y in (state.y, state.y + 100.0)]
        assert torch.equal(*sent)
        assert sent[0].shape == (3, method.leaves(done.number).size)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_numbers_counted_are_those_sent(setting: str) -> None:
    """Where ranks differ, what is beyond a client's rank is zero in the flat vector, and not sent."""
    p = tiny_problem("roberta", head="shared")
    method = build(setting, p)
    for done in train(method, p.F, method.init(p.x, p.y), p.source, Schedule(rounds=3, steps=2)):
        stays, sent = method.send(done.before, done.number)
        ranks, leaves = method.ranks_of(stays), method.leaves(done.number)
        numbers = method.sent_numbers(stays, done.number)
        for k, rank in enumerate(ranks):
            views = leaves.unpack(sent[k : k + 1])
            cut = {e.name: views[e.name][0][tuple(map(slice, e.truncated(rank)))] for e in leaves.entries}
            assert numbers[k] == sum(t.numel() for t in cut.values())
            assert sum(int(t.count_nonzero()) for t in cut.values()) == int(sent[k].count_nonzero())


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_answer_needs_none_of_the_earlier_ones(setting: str) -> None:
    """A client that was away from the beginning gets, with the last answer, all that the others ever got."""
    p = tiny_problem("roberta", head="shared")
    method = build(setting, p)
    away, got = method.init(p.x, p.y), set[str]()
    for done in train(method, p.F, away, p.source, Schedule(rounds=3, steps=1)):
        arrives = method.arrives(done.number)
        got |= set(arrives.by_name)
        assert got == set(arrives.by_name)
        cut_off = any(
            rank is not None for rank in method.ranks_of(away)
        )  # each takes as much as its rank holds
        part = p.layout.shared_kinds("head") if cut_off else p.layout.shared_part
        received, common = (
            p.layout.select(x, Layout.of(e for e in part.entries if e.name in got))
            for x in (
                method.receive(away, done.common, done.number).x,
                method.common(p.x[:1], done.common, done.number),
            )
        )
        assert torch.equal(received, common.expand(3, -1))
