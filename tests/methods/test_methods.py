"""What each method does with x and y, what it sends, and its degenerate cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import SETTINGS, Problem, build, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.method import Method
from pf2lora.engines.batches import Batch, BatchSource, EncodedSource
from pf2lora.engines.local import Round, Schedule, merge_weights, train
from pf2lora.methods import METHODS
from pf2lora.methods.centralized import Centralized
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.local import Local
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.methods.pf2lora_joint import PF2LoRAJoint

ALL = [0, 1, 2]


@dataclass(frozen=True)
class OuterBatches:
    """Every second batch of another source: what a two-batch method draws as its outer batches."""

    source: BatchSource

    @property
    def names(self) -> list[str]:
        return self.source.names

    @property
    def sizes(self) -> list[int]:
        return self.source.sizes

    def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
        return self.source.draw(clients, [2 * n + 1 for n in numbers])


def run(
    method: Method, p: Problem, rounds: int = 3, source: BatchSource | None = None, **schedule: Any
) -> list[Round]:
    state = method.init(p.x, p.y)
    return [
        done.kept()
        for done in train(method, p.F, state, source or p.source, Schedule(rounds, steps=2, **schedule))
    ]


def gradient_at(p: Problem, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    x_, y_ = x.clone().requires_grad_(), y.clone().requires_grad_()
    gx, gy = torch.autograd.grad(p.F(x_, y_, batch).sum(), (x_, y_))
    return gx, gy


@pytest.mark.parametrize("mode", ["exact", "difference", "none"])
def test_pf2lora_with_alpha_zero_is_homlora_on_the_outer_batches(mode: str) -> None:
    """D = 0 at the start and α = 0 keeps it there, so D C = 0 whatever C is."""
    two, one = (tiny_problem("roberta", moved=False, client_rank=r) for r in (2, 0))
    assert torch.equal(two.x, one.x)
    ours = run(PF2LoRA(two.layout, lr=0.01, client_lr=0.0, hypergradient_mode=mode), two)
    theirs = run(HomLoRA(one.layout, lr=0.01), one, source=OuterBatches(one.source))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.before.x, b.before.x, rtol=0, atol=1e-12)
        torch.testing.assert_close(a.served.x, b.served.x, rtol=0, atol=1e-12)
        assert torch.equal(a.served.y, two.y)
    assert (ours[-1].served.x - two.x).abs().max() > 0.01


def test_joint_with_alpha_zero_is_homlora_on_the_same_batches() -> None:
    two, one = (tiny_problem("gpt2", moved=False, client_rank=r) for r in (2, 0))
    ours, theirs = (
        run(PF2LoRAJoint(two.layout, lr=0.01, client_lr=0.0), two),
        run(HomLoRA(one.layout, lr=0.01), one),
    )
    torch.testing.assert_close(ours[-1].served.x, theirs[-1].served.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["exact", "difference", "none"])
def test_per_fedavg_with_alpha_zero_is_homlora_on_the_outer_batches(mode: str) -> None:
    p = regression_problem(client_rank=0)
    ours = run(PerFedAvg(p.layout, lr=0.01, adaptation_lr=0.0, hypergradient_mode=mode), p)
    theirs = run(HomLoRA(p.layout, lr=0.01), p, source=OuterBatches(p.source))
    torch.testing.assert_close(ours[-1].served.x, theirs[-1].served.x, rtol=0, atol=1e-13)


def test_the_lower_level_is_sgd_at_the_old_point_on_the_inner_batch() -> None:
    p = regression_problem()
    inner, outer = p.source.draw(ALL, [0] * 3), p.source.draw(ALL, [1] * 3)
    method = PF2LoRA(p.layout, client_lr=0.2)
    state, report = method.step(p.F, method.init(p.x, p.y), inner, outer)
    torch.testing.assert_close(state.y, p.y - 0.2 * gradient_at(p, p.x, p.y, inner)[1], rtol=0, atol=1e-14)
    torch.testing.assert_close(report.loss, p.F(p.x, p.y, inner))


def test_joint_takes_both_gradients_at_the_same_point() -> None:
    p = regression_problem()
    batch = p.source.draw(ALL, [0] * 3)
    method = PF2LoRAJoint(p.layout, client_lr=0.2, lr=0.05, weight_decay=0.1)
    state, report = method.step(p.F, method.init(p.x, p.y), batch)
    gx, gy = gradient_at(p, p.x, p.y, batch)
    torch.testing.assert_close(state.y, p.y - 0.2 * gy, rtol=0, atol=1e-14)
    torch.testing.assert_close(state.opt.mean, 0.1 * gx, rtol=0, atol=1e-14)
    for k in ALL:
        reference = p.x[k].clone().requires_grad_()
        optimizer = torch.optim.AdamW([reference], lr=0.05, weight_decay=0.1)
        reference.grad = gx[k].clone()
        optimizer.step()
        torch.testing.assert_close(state.x[k], reference.detach(), rtol=0, atol=1e-13)
    assert report.second_order is None


def test_sgd_above_is_line_6_as_it_stands() -> None:
    p = regression_problem()
    batch = p.source.draw(ALL, [0] * 3)
    method = HomLoRA(p.layout, lr=0.05, weight_decay=0.0, optimizer="sgd")
    state, _ = method.step(p.F, method.init(p.x, p.y), batch)
    torch.testing.assert_close(state.x, p.x - 0.05 * gradient_at(p, p.x, p.y, batch)[0], rtol=0, atol=1e-14)


def test_per_fedavg_is_measured_after_one_step_on_the_clients_own_batch() -> None:
    p = regression_problem(client_rank=0)
    batch = p.source.draw(ALL, [0] * 3)
    method = PerFedAvg(p.layout, adaptation_lr=0.3)
    state = method.init(p.x, p.y)
    x, y = method.personal(p.F, state, batch)
    x_ = p.x.clone().requires_grad_()
    (g,) = torch.autograd.grad(p.F(x_, p.y, batch).sum(), x_)
    torch.testing.assert_close(x, p.x - 0.3 * g, rtol=0, atol=1e-14)
    assert torch.equal(y, p.y) and torch.equal(state.x, p.x)


@pytest.mark.parametrize("name", [n for n in METHODS if not METHODS[n].adapts_before_use])
def test_the_others_are_measured_as_they_are(name: str) -> None:
    p = regression_problem()
    options: dict[str, Any] = {"ranks": (4, 4, 4)} if "ranks" in METHODS[name].derived else {}
    method = METHODS[name](p.layout, **options)
    x, y = method.personal(p.F, method.init(p.x, p.y), p.source.draw(ALL, [0] * 3))
    assert torch.equal(x, p.x) and torch.equal(y, p.y)


# ---- what leaves a client ----


@pytest.mark.parametrize("setting", SETTINGS)
def test_y_is_untouched_by_send_and_absent_from_what_is_sent(setting: str) -> None:
    p = tiny_problem("roberta")
    method = build(setting, p)
    state = run(method, p, rounds=1)[0].before
    kept, sent = method.send(state, 1)
    assert torch.equal(kept.y, state.y)
    assert sent.shape == (3, method.leaves(1).size)
    assert not torch.isin(state.y[state.y != 0], sent).any()  # no number of y is in the payload
    after = method.receive(kept, torch.zeros(method.arrives(1).size, dtype=sent.dtype), 1)
    assert torch.equal(after.y, state.y)
    if setting.startswith("pf2lora"):
        assert (state.y != p.y).any()


@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
def test_the_head_leaves_only_when_it_is_shared(head: str) -> None:
    p = tiny_problem("roberta", head=head)
    assert p.model is not None
    classifier = sum(q.numel() for q in p.model.model.get_submodule("classifier").parameters())
    adapters = 2 * 2 * 2 * 4 * 16  # 2 layers, query and value, A and B, rank 4, width 16
    assert p.layout.adapter_size == adapters
    assert p.layout.head_size == (0 if head == "frozen" else classifier)
    assert p.layout.shared == adapters + (classifier if head == "shared" else 0)
    heads = [e.name for e in p.layout.entries if e.kind == "head"]
    assert (heads == []) == (head == "frozen")
    method = PF2LoRA(p.layout, lr=0.01)
    result = run(method, p, rounds=1)[0]
    before, after = p.layout.unpack(result.before.x), p.layout.unpack(result.served.x)
    for name in heads:
        assert (before[name] != p.layout.unpack(p.x)[name]).any()  # trained
        same_for_all = (after[name] == after[name][:1]).all()
        assert (
            same_for_all if head == "shared" else torch.equal(after[name], before[name]) and not same_for_all
        )
    assert (after[p.layout.entries[0].name] == after[p.layout.entries[0].name][:1]).all()
    assert method.sent_numbers(result.before, 1) == [p.layout.shared] * 3


@pytest.mark.parametrize("setting", ["pf2lora-exact", "pf2lora-joint", "homlora", "per-fedavg"])
def test_the_average_is_exact(setting: str) -> None:
    p = regression_problem()
    for weighting, weights in (("uniform", [1 / 3] * 3), ("size", [7 / 22, 12 / 22, 3 / 22])):
        result = run(build(setting, p), p, rounds=1, weighting=weighting)[0]
        expected = sum(w * row for w, row in zip(weights, result.before.x))
        for row in result.served.x:
            torch.testing.assert_close(row, expected, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(result.common[0], expected, rtol=1e-15, atol=1e-15)
        assert torch.equal(result.before.opt.mean, result.served.opt.mean)  # moments stay with the client
        assert torch.equal(result.before.y, result.served.y)


def test_weights_sum_to_one_and_follow_the_sizes() -> None:
    assert merge_weights([3, 5, 8], "uniform").tolist() == [1 / 3] * 3
    assert merge_weights([3, 5, 8], "size").tolist() == [3 / 16, 5 / 16, 8 / 16]


def test_local_never_exchanges() -> None:
    p = regression_problem(client_rank=0)
    method = Local(p.layout, lr=0.01)
    rounds = run(method, p)
    for r in rounds:
        assert torch.equal(r.before.x, r.served.x)
        assert method.sent_numbers(r.served, 1) == [0, 0, 0]
    state = method.init(p.x, p.y)  # the same as uninterrupted training
    for i in range(6):
        state, _ = method.step(p.F, state, p.source.draw(ALL, [i] * 3))
    assert torch.equal(rounds[-1].served.x, state.x)


def test_centralized_is_one_learner_on_the_pooled_rows() -> None:
    p = tiny_problem("roberta", client_rank=0)
    assert isinstance(p.source, EncodedSource)
    pooled = p.source.data.pooled()
    assert pooled.sizes() == [sum(p.source.sizes)]
    assert pooled.token_columns is p.source.data.token_columns
    source = EncodedSource(pooled, ["everybody"], 3, (0,))
    q = p._replace(source=source, x=p.x[:1], y=p.y[:1])
    method = Centralized(p.layout, lr=0.01)
    rounds = run(method, q, rounds=2)
    assert method.pooled and not method.federated
    state = method.init(q.x, q.y)
    seen: set[tuple[int, ...]] = set()
    for i in range(4):
        batch = source.draw([0], [i])
        seen |= {tuple(row.tolist()) for row in batch.tensors["input_ids"]}
        state, _ = method.step(p.F, state, batch)
    torch.testing.assert_close(
        rounds[-1].served.x, state.x, rtol=0, atol=1e-15
    )  # averaging one is no average
    assert len(seen) == 12  # 4 batches of 3 of its 16 rows, none of them twice in an epoch
