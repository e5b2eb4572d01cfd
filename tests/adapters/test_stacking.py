"""Stacked clients equal clients one at a time, and the adapted layer equals a model with merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import (
    CONFIGS,
    SETTINGS,
    Problem,
    RegressionSource,
    build,
    regression_problem,
    tiny_model,
    tiny_problem,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad
from transformers import DebertaV2Config, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pf2lora.core.method import Method, State, Updates
from pf2lora.core.randomness import participants
from pf2lora.engines.batches import Batch
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.methods import METHODS
from pf2lora.methods.rank_per_client import RankPerClient

KINDS = ["roberta", "bert", "mpnet", "deberta-v2", "gpt2", "llama"]  # every method; the others two of them
SOME = ["homlora", "pf2lora-difference"]
RUNS = [(kind, setting) for kind in CONFIGS for setting in (SETTINGS if kind in KINDS else SOME)]

pytestmark = pytest.mark.usefixtures("softmax_in_float64")


def test_every_method_has_a_setting_here() -> None:
    assert {kind for kind, _ in SETTINGS.values()} | {METHODS["centralized"]} == set(METHODS.values())


def stacked(method: Method, p: Problem, schedule: Schedule) -> list[Round]:
    return [done.kept() for done in train(method, p.F, method.init(p.x, p.y), p.source, schedule)]


def averages(method: Method) -> bool:
    """Whether the method's server does nothing but average."""
    kind = type(method)
    return kind.merge is Method.merge and kind.average is Method.average


def one_by_one(method: Method, p: Problem, schedule: Schedule) -> tuple[list[State], list[State]]:
    """M separate states of one client each, and a server: the states before the last average and after it."""
    M = len(p.x)
    alone = [
        replace(method, ranks=(method.ranks[k],)) if isinstance(method, RankPerClient) else method
        for k in range(M)
    ]
    states = [alone[k].init(p.x[k : k + 1], p.y[k : k + 1]) for k in range(M)]
    done, before, server = [0] * M, list(states), method.first_server(p.x[:0, 0])
    for number in range(1, schedule.rounds + 1):
        chosen, sent, before = (
            participants(schedule.seeds[0], number, M, schedule.participation),
            [],
            list(states),
        )
        for k in chosen:
            (variant,) = alone[k].variants_for_round(states[k], number)
            for _ in range(schedule.steps):
                batches = [p.source.draw([k], [done[k] * method.draws + d]) for d in range(method.draws)]
                states[k], _ = variant.step(p.F, states[k], *batches)
                done[k] += 1
            before[k] = states[k]
            states[k], leaves = alone[k].send(states[k], number)
            sent.append(leaves)
        sizes = [p.source.sizes[k] if schedule.weighting == "size" else 1 for k in chosen]
        average = sum((n / sum(sizes) * s[0] for n, s in zip(sizes, sent)), torch.zeros(()))
        if not averages(method):
            weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
            average, server = method.merge(Updates(torch.cat(sent), weights, tuple(chosen), number), server)
        states = [alone[k].receive(states[k], average, number) for k in range(M)]
    return before, states


def assert_same(stack: State, singles: Sequence[State], tolerance: float = 1e-9) -> None:
    for name in ("x", "y"):
        expected = torch.cat([getattr(s, name) for s in singles])
        torch.testing.assert_close(getattr(stack, name), expected, rtol=0, atol=tolerance)
    if hasattr(stack.opt, "rank"):
        assert stack.opt.rank.tolist() == [int(s.opt.rank) for s in singles]


@pytest.mark.parametrize(("kind", "setting"), RUNS)
def test_a_stacked_run_equals_clients_one_at_a_time(kind: str, setting: str) -> None:
    p = tiny_problem(kind, client_rank=2 if SETTINGS[setting][0].two_level else 0)
    method, length = build(setting, p), 2 if kind in KINDS else 1
    schedule = Schedule(rounds=length, steps=length, weighting="size")
    last = stacked(method, p, schedule)[-1]
    before, served = one_by_one(method, p, schedule)
    assert_same(last.before._replace(opt=()), before)
    assert_same(last.served, served)
    assert (last.served.x - p.x).abs().max() > 0.005  # it did train


@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
@pytest.mark.parametrize("setting", ["pf2lora-exact", "hetlora"])
def test_partial_participation_and_every_head_placement(setting: str, head: str) -> None:
    p = tiny_problem("roberta", sizes=(5, 9, 2, 4), head=head)
    method = build(setting, p, **({"ranks": (1, 2, 3, 4)} if setting == "hetlora" else {}))
    schedule = Schedule(rounds=4, steps=1, participation=0.5, weighting="size", seeds=(3,))
    rounds = stacked(method, p, schedule)
    assert len({tuple(r.participants) for r in rounds}) > 1 and all(len(r.participants) == 2 for r in rounds)
    before, served = one_by_one(method, p, schedule)
    assert_same(rounds[-1].before, before)
    assert_same(rounds[-1].served, served)


@pytest.mark.parametrize("setting", SETTINGS)
def test_clients_per_pass_changes_no_number(setting: str) -> None:
    p = tiny_problem("roberta")
    runs = [
        stacked(build(setting, p), p, Schedule(rounds=2, steps=2, participation=0.6, clients_per_pass=n))
        for n in (None, 1, 2, 7)
    ]
    for run in runs[1:]:
        for whole, parts in zip(runs[0], run):
            assert whole.participants == parts.participants
            for a, b in ((whole.before, parts.before), (whole.served, parts.served)):
                torch.testing.assert_close(a.x, b.x, rtol=0, atol=1e-10)
                torch.testing.assert_close(a.y, b.y, rtol=0, atol=1e-10)
            torch.testing.assert_close(whole.stats.loss, parts.stats.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("setting", SETTINGS)
def test_permuting_clients_permutes_results(setting: str) -> None:
    order = [2, 0, 1]
    p = regression_problem()
    assert isinstance(p.source, RegressionSource)
    source = replace(
        p.source,
        inputs=[p.source.inputs[k] for k in order],
        targets=[p.source.targets[k] for k in order],
        names=[p.source.names[k] for k in order],
    )
    q = p._replace(source=source, x=p.x[order], y=p.y[order])
    method = build(setting, p)
    moved = (
        replace(method, ranks=tuple(method.ranks[k] for k in order))
        if isinstance(method, RankPerClient)
        else method
    )
    schedule = Schedule(rounds=3, steps=2, weighting="size")
    one, other = stacked(method, p, schedule)[-1], stacked(moved, q, schedule)[-1]
    for a, b in ((one.before, other.before), (one.served, other.served)):
        torch.testing.assert_close(a.x[order], b.x, rtol=0, atol=1e-10)
        torch.testing.assert_close(a.y[order], b.y, rtol=0, atol=1e-10)
    torch.testing.assert_close(one.stats.loss[:, order], other.stats.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["roberta", "gpt2"])
def test_adapter_dropout_is_the_same_alone_and_in_company(kind: str) -> None:
    """Batches are padded to the longest row of all that share a pass: the masks must not shift with it."""
    p = tiny_problem(kind, dropout=0.4)
    batch = p.source.draw([0, 1, 2], [3, 0, 5])
    together = p.F(p.x, p.y, batch)
    widths = set()
    for k, number in enumerate([3, 0, 5]):
        single = p.source.draw([k], [number])
        widths.add(single.tensors["input_ids"].shape[1])
        torch.testing.assert_close(
            p.F(p.x[k : k + 1], p.y[k : k + 1], single), together[k : k + 1], rtol=0, atol=1e-12
        )
    assert len(widths) > 1
    assert (p.F(p.x, p.y, Batch(3, batch.tensors)) - together).abs().min() > 1e-4  # without keys: no dropout
    assert torch.equal(p.F(p.x, p.y, batch), together)  # the same mask again at a second look
    method, schedule = build("pf2lora-exact", p), Schedule(rounds=2, steps=2)
    assert_same(stacked(method, p, schedule)[-1].served, one_by_one(method, p, schedule)[1])


# ---- the layer against merged weights ----


def merged_weights(base: PreTrainedModel, p: Problem, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One client's `W_0 + s·BA + s̃·DC` under the base model's own parameter names, and its head."""
    assert p.model is not None
    spec = p.model.spec
    common, own = p.model.common_layout.unpack(x), p.model.personal_layout.unpack(y)
    weights: dict[str, Tensor] = {}
    for entry in p.model.common_layout.entries:
        if entry.kind == "head":
            weights[entry.name] = common[entry.name]
        if entry.kind != "A":
            continue
        at = entry.module
        delta = spec.scaling * common[f"{at}.B"] @ common[f"{at}.A"]
        if f"{at}.C" in own:
            delta = delta + spec.client_scaling * own[f"{at}.D"] @ own[f"{at}.C"]
        if at.endswith((".q", ".v")) and at.rpartition(".")[0] in p.model.adapted:  # of a fused projection
            at, _, part = at.rpartition(".")
            whole = base.get_submodule(at)(torch.zeros(1, delta.shape[1], dtype=delta.dtype)).shape[1]
            start = 0 if part == "q" else whole - len(delta)
            delta = pad(delta, (0, 0, start, whole - start - len(delta)))
        layer = base.get_submodule(at)
        assert isinstance(layer, (nn.Linear, Conv1D))
        change = delta.T if isinstance(layer, Conv1D) else delta
        weights[f"{at}.weight"] = weights.get(f"{at}.weight", layer.weight) + change
    return weights


def merged_loss(base: PreTrainedModel, p: Problem, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    inputs = {n: t for n, t in batch.tensors.items() if n != "labels"}
    logits = functional_call(base, merged_weights(base, p, x, y), (), inputs).logits
    return cross_entropy(logits, batch.tensors["labels"])


DEBERTA = CONFIGS["deberta-v2"].to_dict()
OWN_POSITIONS = DebertaV2Config(**(DEBERTA | {"share_att_key": False}))
ONE_WAY = DebertaV2Config(**(DEBERTA | {"pos_att_type": ["c2p"]}))
NO_BUCKETS = DebertaV2Config(**(DEBERTA | {"position_buckets": -1, "max_relative_positions": 6}))
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    *((kind, None, {}) for kind in CONFIGS),
    ("roberta", None, {"targets": ("query", "key", "value", "dense"), "head": "personal"}),
    ("gpt2", None, {"targets": ("c_attn", "mlp.c_fc"), "head": "frozen"}),
    ("llama", None, {"targets": ("k_proj", "down_proj")}),
    ("deberta-v2", None, {"targets": ("query_proj", "key_proj", "value_proj")}),
    ("deberta-v2", OWN_POSITIONS, {}),
    ("deberta-v2", OWN_POSITIONS, {"targets": ("key_proj", "pos_key_proj", "pos_query_proj")}),
    ("deberta-v2", ONE_WAY, {"targets": ("key_proj",)}),
    ("deberta-v2", NO_BUCKETS, {}),
]


@pytest.mark.parametrize(("kind", "config", "spec"), CASES)
def test_stacked_loss_and_gradients_equal_those_of_merged_weights(
    kind: str, config: Any, spec: dict[str, Any]
) -> None:
    p = tiny_problem(kind, model=tiny_model(kind, config=config), scaling=0.7, client_scaling=1.9, **spec)
    base = tiny_model(kind, config=config)
    x, y = p.x.clone().requires_grad_(), p.y.clone().requires_grad_()
    batch = p.source.draw([0, 1, 2], [0, 1, 2])
    loss = p.F(x, y, batch)
    gx, gy = torch.autograd.grad(loss.sum(), (x, y))
    assert (gx.abs().amax(1) > 1e-4).all() and (gy.abs().amax(1) > 1e-4).all()
    for k in range(3):
        x_k, y_k = p.x[k].clone().requires_grad_(), p.y[k].clone().requires_grad_()
        expected = merged_loss(base, p, x_k, y_k, p.source.draw([k], [k]))
        torch.testing.assert_close(loss[k], expected, rtol=0, atol=1e-12)
        g = torch.autograd.grad(expected, (x_k, y_k))
        torch.testing.assert_close(gx[k], g[0], rtol=0, atol=1e-11)
        torch.testing.assert_close(gy[k], g[1], rtol=0, atol=1e-11)
