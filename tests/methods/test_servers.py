"""A server that keeps something between rounds, answers each client apart, and is sent another part in every round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from alternating import Alternating
from tiny import Problem, tiny_problem

from pf2lora.core.layout import Layout
from pf2lora.core.method import State
from pf2lora.engines.local import Round, Schedule, train


def rounds_of(p: Problem, **schedule: Any) -> list[Round]:
    method = Alternating(p.layout)
    state = method.init(p.x, p.y)
    return [r.kept() for r in train(method, p.F, state, p.source, Schedule(**{"steps": 1} | schedule))]


def test_a_round_exchanges_its_own_part_and_every_client_gets_its_own_answer() -> None:
    p = tiny_problem("roberta")
    for done in rounds_of(p, rounds=3):
        part = Alternating(p.layout).leaves(done.number)
        assert {e.kind for e in part.entries} == {"B" if done.number % 2 else "A"}
        assert done.common.shape == (1, 3, part.size)
        before, after = p.layout.select(done.before.x, part), p.layout.select(done.served.x, part)
        expected = torch.arange(3.0).unsqueeze(1) * before.mean(0)
        torch.testing.assert_close(after, expected.to(after), rtol=1e-12, atol=1e-12)
        rest = Layout.of(e for e in p.layout.entries if e not in part.entries)
        assert torch.equal(p.layout.select(done.before.x, rest), p.layout.select(done.served.x, rest))
        (server,) = done.after.servers
        torch.testing.assert_close(server.inner[0], before.mean(0).sum().unsqueeze(0))
        assert server.seen.tolist() == [sum(range(1, done.number + 1))] * 3


def test_each_seed_has_its_own_server() -> None:
    """Two federations of the same clients side by side, of which half take part: what each alone would keep."""
    p, apart = tiny_problem("roberta"), []
    for seed in (0, 1):
        apart.append(rounds_of(p, rounds=3, participation=0.5, seeds=(seed,))[-1].after.servers[0])
    assert apart[0].seen.tolist() != apart[1].seen.tolist()
    both = p._replace(x=p.x.repeat(2, 1), y=p.y.repeat(2, 1), source=Twice(p.source))
    (*_, last) = rounds_of(both, rounds=3, participation=0.5, seeds=(0, 1))
    for own, alone in zip(last.after.servers, apart):
        assert torch.equal(own.seen, alone.seen)
        torch.testing.assert_close(own.inner[0], alone.inner[0])


class Twice:
    """Every client's batches for two seeds: the same ones."""

    def __init__(self, source: Any) -> None:
        self.source, self.names, self.sizes = source, source.names * 2, source.sizes * 2

    def draw(self, clients: Any, numbers: Any) -> Any:
        return self.source.draw([k % 3 for k in clients], numbers)


def test_bytes_follow_what_each_round_sends() -> None:
    p = tiny_problem("roberta", head="shared")
    method, state = Alternating(p.layout), State(p.x, p.y, ())
    kinds = {kind: sum(e.size for e in p.layout.entries if e.kind == kind) for kind in ("A", "B")}
    assert [method.sent_numbers(state, n)[0] for n in (1, 2)] == [kinds["B"], kinds["A"]]


def test_what_clients_share_is_the_mean_of_different_answers() -> None:
    p = tiny_problem("roberta")
    (done,) = rounds_of(p, rounds=1)
    method = Alternating(p.layout)
    common = method.common(p.x[:1], done.common, 1)
    part = method.leaves(1)
    torch.testing.assert_close(p.layout.select(common, part)[0], done.common[0].mean(0))
    assert torch.equal(
        p.layout.select(common, p.layout.shared_kinds("A")),
        p.layout.select(p.x[:1], p.layout.shared_kinds("A")),
    )


@pytest.mark.parametrize("per_pass", [1, 2])
def test_clients_per_pass_changes_nothing(per_pass: int) -> None:
    p = tiny_problem("roberta")
    together, apart = rounds_of(p, rounds=2)[-1], rounds_of(p, rounds=2, clients_per_pass=per_pass)[-1]
    torch.testing.assert_close(apart.served.x, together.served.x, rtol=0, atol=1e-12)
