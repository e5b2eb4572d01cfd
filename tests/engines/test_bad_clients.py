"""Bad clients: who is left out, what becomes of it and of the others, and when a run has too few left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny import SETTINGS, Problem, RegressionSource, build, regression_problem

from pf2lora.core.method import Method, State, Updates, over_tensors, take
from pf2lora.engines.bad_clients import GROWTH, Change, Diverged, UpdateLedger, change, check_enough, lost
from pf2lora.engines.batches import Batch
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA

STEPS = 3


@dataclass(frozen=True)
class Spoilt(RegressionSource):
    """Rows whose targets are multiplied by a factor in some batches: `{(client, batch number): factor}`."""

    factors: dict[tuple[int, int], float] | None = None

    def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
        batch = super().draw(clients, numbers)
        factors = torch.ones(len(clients), dtype=torch.float64)
        for i, key in enumerate(zip(clients, numbers)):
            factors[i] = (self.factors or {}).get(key, 1.0)
        targets = batch.tensors["targets"] * factors.repeat_interleave(self.size)[:, None]
        return replace(batch, tensors=batch.tensors | {"targets": targets})


def spoilt(p: Problem, factors: dict[tuple[int, int], float]) -> Problem:
    source = p.source
    assert isinstance(source, RegressionSource)
    return p._replace(source=Spoilt(source.inputs, source.targets, source.names, factors=factors))


def run(method: Method, p: Problem, schedule: Schedule, **options: Any) -> list[Round]:
    state = method.init(p.x, p.y)
    return [done.kept() for done in train(method, p.F, state, p.source, schedule, **options)]


def equal(a: State, b: State) -> bool:
    same: list[bool] = []
    over_tensors(lambda s, t: same.append(torch.equal(s, t)) or s, a, b)  # type: ignore[func-returns-value]
    return all(same)


@pytest.mark.parametrize("clients_per_pass", [None, 1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_bad_client_is_as_one_that_sat_the_round_out(setting: str, clients_per_pass: int | None) -> None:
    """It keeps its own state and receives the average of the others; in the next round it goes on with new batches."""
    p = regression_problem(sizes=(40, 40, 40))
    method = build(setting, p)
    nan = {(1, STEPS * method.draws + 1): torch.nan}  # in round 2
    schedule = Schedule(rounds=3, steps=STEPS, clients_per_pass=clients_per_pass)
    one, two, three = run(method, spoilt(p, nan), schedule)
    assert two.participants == [0, 2] and two.stats.loss.shape == (STEPS, 2)
    assert list(two.left_out) == [1] and "its loss became nan in local step" in two.left_out[1]
    assert one.left_out == {} == three.left_out and three.participants == [0, 1, 2]
    assert torch.isfinite(three.served.x).all()

    before = take(one.served, [1])
    assert equal(take(two.before, [1]), before)  # optimizer and ranks too
    stays, sent = method.send(take(two.before, [0, 2]), 2)
    updates = Updates(sent, torch.tensor([0.5, 0.5], dtype=torch.float64), (0, 2), 2)
    common, _ = method.merge(updates, one.after.servers[0])
    assert torch.equal(common, two.common[0])
    assert equal(take(two.served, [1]), method.receive(before, common, 2))
    assert equal(take(two.served, [0, 2]), method.receive(stays, common, 2))


@pytest.mark.parametrize("setting", SETTINGS)
def test_who_trains_beside_whom_changes_nothing(setting: str) -> None:
    p = regression_problem(sizes=(40, 40, 40))
    method = build(setting, p)
    broken = spoilt(p, {(0, 1): 1e200, (2, STEPS * method.draws): torch.inf})
    ends = [run(method, broken, Schedule(3, STEPS, clients_per_pass=n)) for n in (None, 1)]
    for together, alone in zip(*ends):
        assert together.left_out == alone.left_out
        torch.testing.assert_close(together.served.x, alone.served.x, rtol=0, atol=1e-12)
        torch.testing.assert_close(together.served.y, alone.served.y, rtol=0, atol=1e-12)
    assert [list(done.left_out) for done in ends[0]] == [[0], [2], []]


def test_the_batches_of_a_bad_round_are_not_drawn_again() -> None:
    p = regression_problem(sizes=(40, 40, 40))
    drawn: list[tuple[int, int]] = []

    class Watched(Spoilt):
        def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
            drawn.extend(zip(clients, numbers))
            return super().draw(clients, numbers)

    assert isinstance(p.source, RegressionSource)
    nan = {(1, 0): torch.nan}
    source = Watched(p.source.inputs, p.source.targets, p.source.names, factors=nan)
    run(HomLoRA(p.layout), p._replace(source=source), Schedule(rounds=3, steps=2))
    assert [n for k, n in drawn if k == 1] == list(range(6))


@pytest.mark.parametrize("kind", [PF2LoRA, PerFedAvg])
def test_a_bad_outer_batch_in_the_last_step_blames_its_own_client_and_round(kind: type[Method]) -> None:
    """The reported loss is the inner batch's: without a look at x, the next round would blame the first client."""
    p = regression_problem(sizes=(40, 40, 40))
    found = run(kind(p.layout), spoilt(p, {(1, 5): torch.nan}), Schedule(rounds=2, steps=3))
    assert [list(done.left_out) for done in found] == [[1], []]


def test_moments_that_overflow_are_no_silent_standstill() -> None:
    """In float32 the square of a gradient of 1e25 is infinite: AdamW would never move again."""
    p = regression_problem(sizes=(40, 40, 40))
    method = HomLoRA(p.layout)
    before = method.init(p.x.float(), p.y.float())
    after = before._replace(opt=before.opt._replace(square=before.opt.square.clone()))
    after.opt.square[1, 0] = torch.inf
    assert lost(before, after).tolist() == [False, True, False]


def test_a_figure_that_a_method_keeps_may_be_undefined() -> None:
    p = regression_problem(sizes=(40, 40, 40))
    method = PF2LoRA(p.layout, hypergradient_mode="auto")
    after = method.init(p.x, p.y)
    before = after._replace(opt=after.opt._replace(share=torch.zeros_like(after.opt.share)))
    assert not lost(before, after).any()


# ---- updates that explode ----


@pytest.mark.parametrize(
    "number", [0, STEPS]
)  # in the first round, when nothing is known yet, and in the second
@pytest.mark.parametrize("clients_per_pass", [None, 1])
def test_an_update_that_explodes_is_left_out(number: int, clients_per_pass: int | None) -> None:
    p = regression_problem(sizes=(40, 40, 40))
    method = HomLoRA(p.layout, lr=0.01, optimizer="sgd", weight_decay=0.0)
    schedule = Schedule(rounds=3, steps=STEPS, clients_per_pass=clients_per_pass)
    found = run(method, spoilt(p, {(1, number): 1e8}), schedule)
    bad = found[number // STEPS]
    assert list(bad.left_out) == [1] and bad.participants == [0, 2]
    assert "more than 1000 times what was seen before" in bad.left_out[1]
    assert sum(len(done.left_out) for done in found) == 1
    before = method.init(p.x, p.y) if number == 0 else found[0].served
    assert equal(take(bad.before, [1]), take(before, [1]))
    assert found[-1].served.x.norm() < 10 * p.x.norm()


def test_an_update_that_is_merely_large_is_kept() -> None:
    p = regression_problem(sizes=(40, 40, 40))
    method = HomLoRA(p.layout, lr=0.01, optimizer="sgd", weight_decay=0.0)
    for factor in (30.0, 300.0):
        found = run(method, spoilt(p, {(1, STEPS): factor}), Schedule(rounds=2, steps=STEPS))
        assert all(done.left_out == {} for done in found)


def judged(ledger: UpdateLedger, moved: Sequence[float], size: float = 0.0) -> dict[int, str]:
    """A round of all learners with losses of one."""
    made = Change(torch.tensor(moved, dtype=torch.float64), torch.full((len(moved),), size))
    bad = ledger.judge(range(len(moved)), torch.ones(2, len(moved)), made)
    return bad | ledger.close()


def test_an_update_is_judged_by_the_largest_of_its_own_and_by_the_median_client() -> None:
    ledger = UpdateLedger(4)
    assert judged(ledger, [1.0, 2.0, 3.0, 1e-9]) == {}
    assert judged(ledger, [0.5, 0.5, 0.5, 1.0]) == {}  # 1e9 times its own, and an honest update
    assert ledger.largest == [1.0, 2.0, 3.0, 1.0]
    assert list(judged(ledger, [1.01 * GROWTH, 0.99 * GROWTH, 3.01 * GROWTH, 0.0])) == [0, 2]
    assert ledger.largest == [1.0, 0.99 * GROWTH, 3.0, 1.0]  # what was left out teaches nothing
    assert judged(ledger, [1.01 * GROWTH] * 4, size=1000.0) == {}  # no more than its own adapters' size


def test_in_the_first_round_the_median_of_that_round_decides() -> None:
    assert list(judged(UpdateLedger(3), [1.0, 1.1, 1200.0])) == [2]
    assert list(judged(UpdateLedger(2), [1.0, 1001.0])) == [1]
    assert judged(UpdateLedger(3), [1.0, 1.1, 999.0]) == {}
    assert judged(UpdateLedger(1), [1e30]) == {}  # alone, nobody can say
    assert list(judged(UpdateLedger(1), [torch.inf])) == [0]  # but this is no number


def test_a_learner_that_may_not_be_compared_is_judged_by_itself() -> None:
    ledger = UpdateLedger(3, compare=False)
    assert judged(ledger, [1.0, 1.0, 2000.0]) == {}
    assert list(judged(ledger, [1001.0, 5.0, 5000.0])) == [0]


def test_federations_know_nothing_of_each_other() -> None:
    """Two seeds of two clients: the second's updates are a thousand times the first's."""
    ledger = UpdateLedger(4, clients=2)
    assert judged(ledger, [1.0, 1.0, 5000.0, 5000.0]) == {}
    assert list(judged(ledger, [2000.0, 1.0, 2000.0, 1.0])) == [0]


def test_a_ledger_is_its_largest_updates() -> None:
    """All that a resumed run needs: one that is given the list judges like the one before."""
    first = UpdateLedger(3)
    judged(first, [1.0, 2.0, 3.0])
    second = UpdateLedger(3, largest=tuple(first.largest))
    for update in ([2500.0, 1.0, 1.0], [1.0, 2500.0, 1.0]):
        assert judged(first, update) == judged(second, update)


# ---- how many may be bad ----


@pytest.mark.parametrize(
    ("bad", "of", "most", "fails"),
    [
        (1, 3, None, False),
        (2, 3, None, True),
        (2, 4, None, False),
        (1, 1, None, True),
        (1, 4, 0, True),
        (3, 4, 3, False),
        (4, 4, 9, True),  # nobody is left
        (0, 4, 0, False),
    ],
)
def test_how_many_may_be_bad(bad: int, of: int, most: int | None, fails: bool) -> None:
    names, everyone = [f"c{i}" for i in range(of)], list(range(of))
    reasons = dict.fromkeys(everyone[:bad], "its loss became nan in local step 1")
    if not fails:
        return check_enough(reasons, [everyone], names, 7, most)
    with pytest.raises(
        Diverged, match=r"client 'c0' is bad in round 7: its loss became nan in local step 1"
    ) as e:
        check_enough(reasons, [everyone], names, 7, most)
    more = f"and {bad - 1} more of {of} clients"
    assert isinstance(e.value, UserError) and "\n" not in str(e.value) and (more in str(e.value)) == (bad > 1)
    return None


def test_weights_that_run_away_end_the_run() -> None:
    p = regression_problem()
    method = HomLoRA(p.layout, lr=1e200, optimizer="sgd", weight_decay=0.0)
    with pytest.raises(Diverged, match="a smaller lr or client_lr usually helps"):
        run(method, p, Schedule(rounds=4, steps=2))


def test_strict_stops_at_the_first() -> None:
    p = spoilt(regression_problem(sizes=(40, 40, 40)), {(1, 4): torch.nan})
    method = HomLoRA(p.layout)
    rounds = train(method, p.F, method.init(p.x, p.y), p.source, Schedule(rounds=5, steps=3, max_bad=0))
    assert next(rounds).left_out == {}
    with pytest.raises(Diverged, match=r"client 'client-1' is bad in round 2: .* nan in local step 2"):
        next(rounds)


def test_a_bad_learner_of_one_seed_does_not_touch_the_others() -> None:
    """Two seeds side by side, a bad client in the second: the first's numbers are those of a run without it."""
    p = regression_problem(sizes=(40, 40, 40, 40))
    method = build("pf2lora-exact", p)
    assert isinstance(p.source, RegressionSource)
    names = ["a", "b", "a", "b"]  # learners of two seeds, whose rows differ
    p = p._replace(source=replace(p.source, names=names))
    schedule = Schedule(rounds=3, steps=STEPS, seeds=(0, 1))
    clean, bad = run(method, p, schedule), run(method, spoilt(p, {(3, 2): torch.nan}), schedule)
    for a, b in zip(clean, bad):
        assert torch.equal(a.common[0], b.common[0])
        assert equal(take(a.served, [0, 1]), take(b.served, [0, 1]))
    assert list(bad[0].left_out) == [3] and bad[0].participants == [0, 1, 2]
    assert not torch.equal(clean[0].common[1], bad[0].common[1])


def test_a_method_that_sends_nothing_goes_on_too() -> None:
    p = regression_problem(sizes=(40, 40, 40))
    method = build("local", p)
    found = run(method, spoilt(p, {(1, 0): torch.nan}), Schedule(rounds=2, steps=STEPS))
    untouched = method.init(p.x, p.y)
    assert equal(take(found[0].served, [1]), take(untouched, [1]))
    assert (found[1].served.x[1] != p.x[1]).any() and found[0].common.shape == (1, 0)


def test_change_is_the_norm_over_both_adapters() -> None:
    before = State(torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([[4.0], [1.0]]), ())
    after = State(torch.tensor([[3.0, 5.0], [0.0, 0.0]]), torch.tensor([[16.0], [1.0]]), ())
    made = change(before, after)
    assert made.moved.tolist() == [13.0, 0.0] and made.size.tolist() == [5.0, 1.0]
