"""The local engine: deterministic, and fair to every client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import Problem, RegressionSource, regression_problem, tiny_data, tiny_problem

from pf2lora.core.method import Method, State, over_tensors, put, take
from pf2lora.engines.batches import Batch, EncodedSource
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.engines.steps import Step
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.local import Local
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.tasks.classification.task import Classification


def run(method: Method, p: Problem, schedule: Schedule) -> list[Round]:
    return [done.kept() for done in train(method, p.F, method.init(p.x, p.y), p.source, schedule)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_seed_gives_the_same_bits(dtype: torch.dtype) -> None:
    results = []
    for _ in range(2):
        p = tiny_problem("roberta", dropout=0.2)
        assert p.model is not None
        p.model.model.to(dtype)  # type: ignore[arg-type]
        p = p._replace(x=p.x.to(dtype), y=p.y.to(dtype))
        results.append(run(PF2LoRA(p.layout), p, Schedule(rounds=2, steps=2, participation=0.7)))
    for a, b in zip(*results):
        assert a.participants == b.participants
        assert torch.equal(a.served.x, b.served.x) and torch.equal(a.served.y, b.served.y)
        assert torch.equal(a.stats.loss, b.stats.loss)


def test_another_seed_gives_other_numbers() -> None:
    p = tiny_problem("roberta")
    assert p.model is not None and isinstance(p.source, EncodedSource)
    one, same, other = (p.model.initial(seed, ["a", "b"]) for seed in (0, 0, 1))
    assert torch.equal(one[0], same[0]) and torch.equal(one[1], same[1])
    assert (one[0] != other[0]).any() and (one[1] != other[1]).any()
    shuffled = p._replace(source=replace(p.source, seeds=(1,)))
    a, b = (run(HomLoRA(q.layout), q, Schedule(rounds=1, steps=2))[0] for q in (p, shuffled))
    assert (a.stats.loss != b.stats.loss).any()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_client_alone_does_not_notice_who_else_is_there(dropout: float) -> None:
    """Local with {a, b, c} and with {a, b, c, d}: what a, b and c get is the same."""
    results = []
    whole = tiny_data((5, 9, 2, 6))
    for count in (3, 4):
        names = ["a", "b", "c", "d"][:count]
        p = tiny_problem("roberta", sizes=(5, 9, 2, 6)[:count], dropout=dropout, moved=False)
        data = replace(whole, starts=whole.starts[: count + 1])
        assert p.model is not None
        x, y = p.model.initial(0, names, torch.float64)
        p = p._replace(source=EncodedSource(data, names, 3, (0,), keyed=dropout > 0), x=x, y=y)
        results.append(run(Local(p.layout, lr=0.01), p, Schedule(rounds=2, steps=3))[-1].served)
    torch.testing.assert_close(results[0].x, results[1].x[:3], rtol=0, atol=1e-10)
    assert torch.equal(results[0].y, results[1].y[:3])


def test_clients_of_any_size_train() -> None:
    p = tiny_problem("roberta", sizes=(1, 2, 30), batch=4)
    result = run(PF2LoRA(p.layout), p, Schedule(rounds=2, steps=2))[-1]
    assert result.stats.loss.shape == (2, 3) and torch.isfinite(result.stats.loss).all()
    assert result.stats.second_order is not None and result.stats.second_order.shape == (2, 3)
    assert (result.before.x != p.x).any(1).all()


def test_a_round_reports_what_it_did() -> None:
    p = regression_problem()
    ticks: list[Step] = []
    method = HomLoRA(p.layout)
    schedule = Schedule(rounds=3, steps=2, participation=0.5, clients_per_pass=1)
    rounds = [
        done.kept()
        for done in train(method, p.F, method.init(p.x, p.y), p.source, schedule, on_step=ticks.append)
    ]
    assert [r.number for r in rounds] == [1, 2, 3]
    assert all(r.stats.loss.shape == (2, 2) and r.seconds > 0 for r in rounds)
    assert sum(step.clients for step in ticks) == 3 * 2 * 2  # rounds, steps, clients
    assert all(step.method == method and step.lengths == (1,) for step in ticks)
    first = rounds[0]
    for k, column in zip(first.participants, first.stats.loss.T):
        expected = p.F(p.x[k : k + 1], p.y[k : k + 1], p.source.draw([k], [0]))
        torch.testing.assert_close(column[0], expected[0])


def test_a_client_that_sits_out_goes_on_where_it_stopped() -> None:
    """Its own batches are drawn without a gap, its y and moments wait for it, and it is served the average."""
    p = regression_problem()
    drawn: list[tuple[int, int]] = []

    class Watched(RegressionSource):
        def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
            drawn.extend(zip(clients, numbers))
            return super().draw(clients, numbers)

    assert isinstance(p.source, RegressionSource)
    source = Watched(p.source.inputs, p.source.targets, p.source.names)
    method = PF2LoRA(p.layout)
    state = method.init(p.x, p.y)
    before = state
    for r in train(method, p.F, state, source, Schedule(rounds=6, steps=2, participation=0.5)):
        for k in set(range(3)) - set(r.participants):
            assert torch.equal(r.served.y[k], before.y[k]) and torch.equal(
                r.served.opt.mean[k], before.opt.mean[k]
            )
        assert (r.served.x == r.served.x[:1]).all()
        before = r.kept().served
    for k in range(3):
        numbers = sorted(n for client, n in drawn if client == k)
        assert numbers == list(range(len(numbers))) and numbers


@pytest.mark.parametrize("clients", [[2, 0], [1, 2], [0, 1, 2], [1]])
def test_neighbours_and_scattered_clients_are_taken_and_put_alike(clients: list[int]) -> None:
    p = regression_problem()
    state = PF2LoRA(p.layout).init(p.x, p.y)
    part = take(state, clients)
    assert torch.equal(part.x, p.x[torch.tensor(clients)])
    changed = over_tensors(torch.clone, state)
    put(changed, clients, part._replace(x=part.x + 1))
    moved = torch.zeros(3, 1).to(p.x)
    moved[clients] = 1
    assert torch.equal(changed.x, p.x + moved) and torch.equal(changed.y, p.y)


def test_a_round_leaves_the_first_state_alone_and_what_is_kept_stays() -> None:
    p = regression_problem()
    method = PF2LoRA(p.layout, lr=0.05)
    state = method.init(p.x, p.y)
    first = over_tensors(torch.clone, state)
    rounds = train(method, p.F, state, p.source, Schedule(rounds=2, steps=2))
    one = next(rounds)
    kept = one.kept()
    again = kept.kept()
    next(rounds)
    assert torch.equal(state.x, first.x) and torch.equal(state.y, first.y)
    assert torch.equal(kept.before.y, again.before.y) and torch.equal(kept.served.x, again.served.x)
    assert not torch.equal(one.before.x, kept.before.x)  # the engine's own, written over


def test_take_and_put_are_inverse_and_leave_the_whole_alone() -> None:
    p = regression_problem()
    method = PF2LoRA(p.layout)
    state = method.init(p.x, p.y)
    part = take(state, [2, 0])
    assert (
        torch.equal(part.x, p.x[[2, 0]])
        and torch.equal(part.y, p.y[[2, 0]])
        and part.opt.step.shape == (2, 1)
    )
    changed = over_tensors(torch.clone, state)
    put(changed, [2, 0], State(part.x + 1, part.y, part.opt._replace(step=part.opt.step + 5)))
    assert torch.equal(changed.x, p.x + torch.tensor([[1.0], [0.0], [1.0]]))
    assert changed.opt.step.flatten().tolist() == [5, 0, 5] and not state.opt.step.any()
    put(changed, [2, 0], part)
    assert torch.equal(changed.x, state.x) and torch.equal(changed.y, state.y)


# ---- the classification task that the engine's losses come from ----


def test_predictions_do_not_depend_on_company_() -> None:
    p = tiny_problem("roberta")
    assert p.model is not None
    task = Classification(None, ["0", "1", "2"], evaluation_batch=4)  # type: ignore[arg-type]
    data = tiny_data((5, 9, 2), seed=4)
    together = task.predict(p.model, p.x, p.y, data)
    for k, (start, stop) in enumerate(zip(data.starts, data.starts[1:])):
        for i, logits in zip(range(start, stop), together[k]):
            row = Batch(1, data.rows(np.array([i])))
            alone = task.logits(p.model, p.x[k : k + 1], p.y[k : k + 1], row)[0]
            np.testing.assert_allclose(logits, alone.numpy(), atol=1e-12)
